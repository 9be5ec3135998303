"""A terminal, or a pipe in its place: colours, and tables that fit its width."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from fp8scope.cli.reading.printing import MIN_WIDTH, cut, width_of

COLOURS: Final[Mapping[str, str]] = {
    "good": "32",
    "danger": "31",
    "warning": "33",
    "muted": "2",
    "strong": "1",
}
GAP: Final = "  "


@dataclass(frozen=True)
class TableCell:
    """The text of a cell and the name of its colour; empty for that of the terminal."""

    text: str
    colour: str = ""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column: its cells are cut if it `gives`, and it is left out first if its `rank` is higher."""

    title: str
    is_number: bool = False
    gives: bool = False
    rank: int = 0


class Terminal:
    """The output of a command.

    Args:
        stream: standard output by default.
        environment: NO_COLOR, TERM and COLUMNS are read from it.
    """

    def __init__(self, stream: TextIO | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        variables = os.environ if environment is None else environment
        self.is_terminal = self._stream.isatty()
        self._has_colour = (
            self.is_terminal and not variables.get("NO_COLOR") and variables.get("TERM", "") != "dumb"
        )
        self._encoding = getattr(self._stream, "encoding", None) or "ascii"

    @property
    def width(self) -> int | None:
        """The columns of a terminal; None where there is none, and lines may be of any length."""
        return shutil.get_terminal_size().columns if self.is_terminal else None

    def line(self, text: str = "", colour: str = "") -> None:
        """Write a line of printable text."""
        encoded = text.encode(self._encoding, "replace").decode(self._encoding)
        self._stream.write(f"{self.coloured(encoded, colour)}\n")

    def cells(self, cells: Sequence[TableCell]) -> None:
        """Write texts with colours of their own in a line."""
        texts = [cell.text.encode(self._encoding, "replace").decode(self._encoding) for cell in cells]
        parts = [self.coloured(text, cell.colour) for text, cell in zip(texts, cells, strict=True)]
        self._stream.write(f"{GAP.join(parts)}\n")

    def flush(self) -> None:
        """Send what was written."""
        self._stream.flush()

    def coloured(self, text: str, colour: str) -> str:
        """The text in a colour, if the terminal has colours and nobody has switched them off."""
        if not self._has_colour or not colour:
            return text
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"

    def table(self, columns: Sequence[TableColumn], rows: Sequence[Sequence[TableCell]]) -> None:
        """Write a table that fits: columns are cut, and those of the highest rank are left out."""
        shown = list(range(len(columns)))
        widths = _widths(columns, rows)
        room = self.width
        while room is not None and _least(columns, widths, shown) > room and len(shown) > 1:
            shown.remove(max(shown, key=lambda i: (columns[i].rank, i)))
        if room is not None:
            _narrow(columns, widths, shown, room)
        self._row(columns, widths, shown, [TableCell(column.title, "muted") for column in columns])
        for row in rows:
            self._row(columns, widths, shown, row)

    def _row(
        self,
        columns: Sequence[TableColumn],
        widths: Sequence[int],
        shown: Sequence[int],
        row: Sequence[TableCell],
    ) -> None:
        parts = []
        for i in shown:
            text = cut(row[i].text, widths[i])
            space = " " * (widths[i] - width_of(text))
            encoded = text.encode(self._encoding, "replace").decode(self._encoding)
            drawn = self.coloured(encoded, row[i].colour)
            last = i == shown[-1]
            parts.append(f"{space}{drawn}" if columns[i].is_number else drawn if last else f"{drawn}{space}")
        self._stream.write(f"{GAP.join(parts)}\n")


def _widths(columns: Sequence[TableColumn], rows: Sequence[Sequence[TableCell]]) -> list[int]:
    titles = [width_of(column.title) for column in columns]
    return [max([titles[i], *(width_of(row[i].text) for row in rows)]) for i in range(len(columns))]


def _least(columns: Sequence[TableColumn], widths: Sequence[int], shown: Sequence[int]) -> int:
    """The columns that a table takes at least."""
    least = [min(widths[i], 3 * MIN_WIDTH) if columns[i].gives else widths[i] for i in shown]
    return sum(least) + len(GAP) * (len(shown) - 1)


def _narrow(columns: Sequence[TableColumn], widths: list[int], shown: Sequence[int], room: int) -> None:
    """Cut the widest of the columns that give until the table fits."""
    giving = [i for i in shown if columns[i].gives] or [shown[0]]
    over = sum(widths[i] for i in shown) + len(GAP) * (len(shown) - 1) - room
    while over > 0:
        widest = max(giving, key=lambda i: widths[i])
        if widths[widest] <= 1:
            return
        widths[widest] -= 1
        over -= 1
