"""Lines of the console log are what a terminal would show."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.recording.terminal import LINE_LENGTH, ROWS, Screen, TerminalLine


def shown(*texts: str) -> list[str]:
    """The lines after these writes, each as the last `take` that has it shows it."""
    screen, lines = Screen(itertools.count().__next__), dict[int, str]()
    for step, text in enumerate(texts):
        screen.feed(text, 1.0, step)
        lines |= {line.number: line.text.rstrip() for line in screen.take()}
    return [lines[number] for number in sorted(lines)]


def grid(text: str) -> list[str]:
    """The same by a grid of characters, one at a time."""
    rows, row, column = [dict[int, str]()], 0, 0
    top = 0
    for character in text:
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            top = max(top, row)
        else:
            while len(rows) <= row:
                rows.append({})
            rows[row][column] = character
            column += 1
    while len(rows) < top:
        rows.append({})
    if not text.replace("\r", ""):
        return []
    return ["".join(r.get(i, " ") for i in range(max(r, default=-1) + 1)).rstrip() for r in rows]


def test_it_works() -> None:
    assert shown("one\ntwo\n", "three") == ["one", "two", "three"]


@given(st.text(alphabet="ab \r\n", max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_carriage_returns_show_the_last_state(text: str, cuts: list[int]) -> None:
    """However the text is cut into writes."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    assert shown(*[text[a:b] for a, b in itertools.pairwise(ends)] or [text]) == grid(text)


@given(st.text(max_size=200))
def test_any_text_is_taken(text: str) -> None:
    for line in shown(text):
        assert len(line) <= LINE_LENGTH and "\x1b" not in line and "\r" not in line


def test_colours_are_left_out_wherever_they_are_cut() -> None:
    text = "\x1b[1;31mred\x1b[0m \x1b]8;;https://x.test\x07link\x1b]8;;\x07"
    for cut in range(len(text)):
        assert shown(text[:cut], text[cut:]) == ["red link"]


def test_two_progress_bars_are_two_lines() -> None:
    """As tqdm writes them: down to the second bar, and up again."""
    writes = []
    for step in range(50):
        writes += [f"\router {step}", "\n", f"\rinner {step}", "\x1b[A"]
    assert shown(*writes) == ["outer 49", "inner 49"]


def test_a_long_line_is_cut_off() -> None:
    assert [len(line) for line in shown("x" * 10_000 + "\n", "y" * 1_999, "zz")] == [LINE_LENGTH, LINE_LENGTH]


def test_few_lines_can_change() -> None:
    lines = "".join(f"{number}\n" for number in range(100))
    assert shown(lines, "\x1b[99A\rfirst")[100 - ROWS] == "first"


def test_a_line_has_the_step_of_its_last_change() -> None:
    screen = Screen(itertools.count(5).__next__)
    screen.feed("a", 1.0, 1)
    screen.feed("\rb", 2.0, 7)
    assert screen.take() == [TerminalLine(5, 2.0, 7, "b")]
    assert screen.take() == []


@pytest.mark.parametrize("how", ["\x1b[K", "\x1b[0K", "\x1b[2K", "\x1b[1K"])
def test_erases_lines(how: str) -> None:
    assert shown(f"abc\r{how}x") == ["xbc" if how == "\x1b[1K" else "x"]
