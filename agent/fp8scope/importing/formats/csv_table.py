"""Plain CSV and TSV files: a column for the step, and one for each metric."""

import csv
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from fp8scope.importing.formats.plain import ColumnRoles, has_step, is_number_text, plain_run
from fp8scope.importing.limits import MAX_LINE
from fp8scope.importing.model import SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.tables import NO_TIME, RowTables
from fp8scope.importing.values import micros_of, step_of

MAX_COLUMNS: Final = 20_000
ROWS_AT_ONCE: Final = 1_024


def matches(candidate: SourcePath) -> bool:
    """A header, and a row of as many cells of which one is a number."""
    lines = candidate.text.splitlines()[:2]
    if len(lines) < 2:
        return False
    header, row = (next(csv.reader([line], delimiter=_delimiter(lines[0])), []) for line in lines)
    return (
        len(header) == len(row) > 1 and not all(map(is_number_text, header)) and any(map(is_number_text, row))
    )


def matches_below(candidate: SourcePath) -> bool:
    """A table with a step, in a file that is called one."""
    if candidate.path.suffix.lower() not in (".csv", ".tsv") or not matches(candidate):
        return False
    header = candidate.text.splitlines()[0].removeprefix("\ufeff")
    return has_step(next(csv.reader([header], delimiter=_delimiter(header)), []))


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of the file."""
    notes: list[str] = []
    yield plain_run(source, _parts(source, notes), notes)


def _parts(source: ImportSource, notes: list[str]) -> Iterator[ValueTable]:
    names = MetricNames(source.loss)
    try:
        yield from _tables(source, names, notes)
    except csv.Error as error:
        raise UnreadableError(f"{source.path} is not CSV: {error}") from None
    notes += names.notes()


def _tables(source: ImportSource, names: MetricNames, notes: list[str]) -> Iterator[ValueTable]:
    csv.field_size_limit(MAX_LINE)
    texts = (line.decode("utf-8", "replace") for line in source.lines())
    first = next(texts, "").removeprefix("\ufeff")
    delimiter = _delimiter(first)
    header = next(csv.reader([first], delimiter=delimiter), [])
    if not header or len(header) > MAX_COLUMNS:
        raise UnreadableError(f"{source.path} has {len(header):,} columns; a table has 1 to {MAX_COLUMNS:,}")
    roles = ColumnRoles.of(header, source)
    metrics = [index for index in range(len(header)) if index not in (roles.step, roles.time)]
    reader, block = csv.reader(texts, delimiter=delimiter), _Blocks(header, roles, metrics, RowTables(names))
    while cells := list(islice(reader, ROWS_AT_ONCE)):
        block.add([row for row in cells if len(row) == len(header)])
        block.skipped += sum(0 < len(row) != len(header) for row in cells)
        if block.rows.is_full:
            yield from block.rows.take()
    yield from block.rows.take()
    notes += roles.notes(block.skipped, [header[index] for index in sorted(block.texts)])


class _Blocks:
    """Adds blocks of rows to tables: column by column where all cells are numbers, else row by row."""

    def __init__(
        self, header: Sequence[str], roles: ColumnRoles, metrics: Sequence[int], rows: RowTables
    ) -> None:
        self.rows = rows
        self.skipped = 0
        self.texts = set(metrics)
        """The columns that have had no number yet."""
        self._header = header
        self._roles = roles
        self._metrics = metrics
        self._counter = 0

    def add(self, cells: Sequence[Sequence[str]]) -> None:
        """Add rows of as many cells as the header has."""
        if not cells:
            return
        columns = list(zip(*cells, strict=True))
        steps = self._steps(columns)
        valid = [row for row, step in enumerate(steps) if step is not None]
        self.skipped += len(steps) - len(valid)
        if not valid:
            return
        times = self._times(columns)
        first = self.rows.count
        self.rows.add_steps([steps[row] or 0 for row in valid], [times[row] for row in valid])
        for index in self._metrics:
            chosen = columns[index] if len(valid) == len(steps) else [columns[index][row] for row in valid]
            self._add_column(index, chosen, first)

    def _add_column(self, index: int, cells: Sequence[str], first: int) -> None:
        try:
            values = list(map(float, cells))
            rows: Sequence[int] = range(first, first + len(cells))
        except ValueError:
            values, rows = _numbers(cells, first)
        if values:
            self.texts.discard(index)
            self.rows.add_column(self._header[index], rows, values)

    def _steps(self, columns: Sequence[Sequence[str]]) -> Sequence[int | None]:
        if self._roles.step is None:
            first = self._counter
            self._counter += len(columns[0])
            return range(first, self._counter)
        return [step_of(cell) for cell in columns[self._roles.step]]

    def _times(self, columns: Sequence[Sequence[str]]) -> Sequence[int]:
        if self._roles.time is None:
            return [NO_TIME] * len(columns[0])
        moments = map(micros_of, columns[self._roles.time])
        return [NO_TIME if moment is None else moment for moment in moments]


def _numbers(cells: Sequence[str], first: int) -> tuple[list[float], list[int]]:
    """The cells that are numbers, and their rows."""
    values, rows = [], []
    for row, cell in enumerate(cells, first):
        if cell:
            try:
                values.append(float(cell))
            except ValueError:
                continue
            rows.append(row)
    return values, rows


def _delimiter(header: str) -> str:
    return max(",\t;", key=header.count)


FORMAT = FileFormat(name="csv", title="CSV", matches=matches, read=read, matches_below=matches_below)
