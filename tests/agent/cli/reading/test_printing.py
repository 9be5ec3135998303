"""Text for a terminal: no character of a name is obeyed, and every text has the width that is said."""

from __future__ import annotations

import io
import math
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.cli.reading.common import as_json
from fp8scope.cli.reading.printing import BARS, cut, difference, number, sparkline, width_of
from fp8scope.cli.reading.terminal import TableCell, TableColumn, Terminal
from fp8scope.client.plain_text import printable

COLUMNS = (
    TableColumn(title="run", gives=True),
    TableColumn(title="state", rank=1),
    TableColumn(title="loss", is_number=True, rank=2),
    TableColumn(title="note", gives=True, rank=3),
)


class Tty(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        return self.bytes.getvalue().decode(self.encoding)


def table(width: int, rows: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a table on a terminal of this width, without colours."""
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Tty()
    Terminal(stream, {"NO_COLOR": "1"}).table(COLUMNS, [[TableCell(text) for text in row] for row in rows])
    return stream.text.splitlines()


def test_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table(60, [["gpt fp8", "finished", "2.31", "fine"], ["模型", "failed", "nan", "x"]], monkeypatch)
    assert lines == [
        "run      state     loss  note",
        "gpt fp8  finished  2.31  fine",
        "模型     failed     nan  x",
    ]


@given(text=st.text())
def test_no_character_is_obeyed(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Zl", "Zp", "Cs"}
    assert "\x1b" not in shown and "\u202e" not in shown and "\n" not in shown and "\x9b" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\r\nb\tc", "a\\x0d\\x0ab\\x09c"),
        ("\x9b2J", "\\x9b2J"),
        ("gpt\u202egnp.exe", "gpt\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("12\u202f%", "12 %"),
        ("模型 é 👩‍🔬", "模型 é 👩‍🔬"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "width"),
    [("abc", 3), ("模型", 4), ("é", 1), ("e\u0301", 1), ("", 0), ("👩‍🔬", 2), ("ｆｐ８", 6)],
)
def test_widths(text: str, width: int) -> None:
    assert width_of(text) == width


@given(text=st.text(), width=st.integers(0, 30))
def test_a_cut_text_fits(text: str, width: int) -> None:
    shown = printable(text)
    assert width_of(cut(shown, width)) <= width
    if width_of(shown) <= width:
        assert cut(shown, width) == shown


def test_a_long_name_keeps_both_ends() -> None:
    assert cut("gpt-124m-fp8-delayed-seed-17", 15) == "gpt-124…seed-17"


@given(
    rows=st.lists(st.lists(st.text(max_size=40), min_size=4, max_size=4), max_size=6),
    width=st.integers(10, 120),
)
def test_a_table_fits(rows: list[list[str]], width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lines = table(width, [[printable(text) for text in row] for row in rows], patch)
    assert len(lines) == 1 + len(rows) and all(width_of(line) <= width for line in lines)


def test_a_narrow_terminal_loses_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ["gpt fp8 delayed seed 17", "finished", "2.3145", "a long note"]
    assert table(200, [row], monkeypatch)[0].split() == ["run", "state", "loss", "note"]
    assert table(36, [row], monkeypatch)[0].split() == ["run", "state", "loss"]
    assert table(20, [row], monkeypatch)[0].split() == ["run"]


def test_a_pipe_gets_whole_names() -> None:
    stream = io.StringIO()
    Terminal(stream, {}).table(
        COLUMNS, [[TableCell("x" * 300, "danger"), TableCell(""), TableCell(""), TableCell("")]]
    )
    assert "x" * 300 in stream.getvalue() and "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("variables", "has_colour"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours(variables: dict[str, str], has_colour: bool) -> None:
    stream = Tty()
    Terminal(stream, variables).line("bad", "danger")
    assert stream.text == ("\x1b[31mbad\x1b[0m\n" if has_colour else "bad\n")


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    stream = Tty("ascii")
    terminal = Terminal(stream, {})
    terminal.line("模型 – 2 %")
    terminal.cells([TableCell("ü", "strong")])
    terminal.table(COLUMNS[:1], [[TableCell("é", "good")]])
    assert stream.text.startswith("?? ? 2 %\n")


@given(values=st.lists(st.floats(), max_size=200), width=st.integers(1, 80))
def test_a_small_line_fits(values: list[float], width: int) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        line = sparkline(np.array(values), width)
    assert len(line) <= width and set(line) <= {*BARS, " "}


def test_a_small_line_falls_with_the_loss() -> None:
    line = sparkline(1.0 / np.arange(1.0, 101.0), 20)
    assert line[0] == "█" and line[-1] == "▁" and sparkline(np.full(9, np.nan), 5) == ""


def test_numbers() -> None:
    assert number(None) == "–" and number(2.31449) == "2.314" and number(math.nan) == "NaN"
    assert difference(0.00125, "relative") == "+0.125 %" and difference(-0.5, "nats") == "-0.5 nats"
    assert difference(None, "relative") == "–" and difference(0.0025, "relative", signed=False) == "0.25 %"


def test_json_has_only_what_json_has() -> None:
    assert as_json({"a": np.array([1.0, math.nan]), "b": (math.inf, -math.inf)}) == {
        "a": [1.0, "NaN"],
        "b": ["Infinity", "-Infinity"],
    }
