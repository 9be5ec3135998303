"""The lines that a terminal would show: carriage returns and moves of the cursor are carried out.

A progress bar writes its line again and again. Only the last state of a line counts, also of the lines of
several bars, between which the cursor moves up and down. Colours are left out.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LINE_LENGTH: Final = 2_000
"""Characters of a line; the rest is cut off."""
ROWS: Final = 32
"""Lines that can still change; the cursor does not get above them."""

_SPECIAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TOKEN = re.compile(
    r"\x1b\[(?P<arguments>[0-9;?]*)[ -/]*(?P<command>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[^\[\]]"
    r"|(?P<text>[^\x00-\x08\x0a-\x1f\x7f]+)"
    r"|(?P<control>.)",
    re.DOTALL,
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]*|\][^\x07\x1b]{0,256})?$")


@dataclass(slots=True)
class TerminalLine:
    """One line. `number` counts the lines of a process; `time` (Unix seconds) and `step` are those of its
    last change.
    """

    number: int
    time: float
    step: int
    text: str = ""


class Screen:
    """The lines of one stream. `next_number` returns the number of a new line."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        self._next_number = next_number
        self._rows: list[TerminalLine] = []
        self._row = 0
        self._column = 0
        self._changed: dict[int, TerminalLine] = {}
        self._unfinished = ""

    def feed(self, text: str, time: float, step: int) -> None:
        """Write a text at the cursor."""
        if self._unfinished:
            text, self._unfinished = self._unfinished + text, ""
        if _SPECIAL.search(text) is None:
            head, *rest = text.split("\n")
            if head:
                self._write(head, time, step)
            for piece in rest:
                self._break(time, step)
                if piece:
                    self._write(piece, time, step)
            return
        if (tail := _UNFINISHED.search(text)) is not None:
            text, self._unfinished = text[: tail.start()], tail[0]
        for token in _TOKEN.finditer(text):
            if (plain := token["text"]) is not None:
                self._write(plain, time, step)
            elif token["command"] is not None:
                self._move(token["command"], token["arguments"], time, step)
            elif (control := token["control"]) == "\n":
                self._break(time, step)
            elif control == "\r":
                self._column = 0
            elif control == "\b":
                self._column = max(0, self._column - 1)

    def take(self) -> list[TerminalLine]:
        """The lines that have changed since the last call, in the order of their numbers."""
        changed, self._changed = self._changed, {}
        return [changed[number] for number in sorted(changed)]

    def _write(self, text: str, time: float, step: int) -> None:
        line, column = self._line(time, step), self._column
        if column < LINE_LENGTH:
            before = line.text
            if column > len(before):
                before = before.ljust(column)
            line.text = (before[:column] + text + before[column + len(text) :])[:LINE_LENGTH]
        self._column = min(LINE_LENGTH, column + len(text))
        self._note(line, time, step)

    def _break(self, time: float, step: int) -> None:
        if self._row == len(self._rows):
            self._note(self._line(time, step), time, step)
        self._row += 1
        self._column = 0

    def _move(self, command: str, arguments: str, time: float, step: int) -> None:
        first = arguments.partition(";")[0]
        count = int(first) if first.isdecimal() and len(first) < 6 else 0
        if command in "AF":
            self._row = max(0, self._row - max(1, count))
        elif command in "BE":
            self._row = min(len(self._rows), self._row + max(1, count))
        elif command == "C":
            self._column = min(LINE_LENGTH, self._column + max(1, count))
        elif command == "D":
            self._column = max(0, self._column - max(1, count))
        elif command == "G":
            self._column = min(LINE_LENGTH, max(1, count) - 1)
        elif command == "K" and self._row < len(self._rows):
            self._erase(self._rows[self._row], count, time, step)
        if command in "EF":
            self._column = 0

    def _erase(self, line: TerminalLine, how: int, time: float, step: int) -> None:
        """Erase to the end of the line (0), to its beginning (1), or all of it (2)."""
        remaining = line.text[: self._column] if how == 0 else ""
        if how == 1:
            remaining = " " * min(len(line.text), self._column + 1) + line.text[self._column + 1 :]
        line.text = remaining
        self._note(line, time, step)

    def _line(self, time: float, step: int) -> TerminalLine:
        """The line of the cursor; made if there is none yet."""
        if self._row == len(self._rows):
            self._rows.append(TerminalLine(self._next_number(), time, step))
            if len(self._rows) > ROWS:
                del self._rows[0]
                self._row -= 1
        return self._rows[self._row]

    def _note(self, line: TerminalLine, time: float, step: int) -> None:
        line.time, line.step = time, step
        self._changed[line.number] = line
