"""The columns of plain tables with the step and the time, and the run of such a file."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from fp8scope.importing.model import SourceRun, UnreadableError, ValueTable
from fp8scope.importing.source import ImportSource

STEP_NAMES: Final = (
    *("step", "_step", "global_step", "trainer/global_step", "iteration", "iter", "train_step", "steps"),
    *("optimizer_step", "update", "num_updates", "batch", "epoch"),
)
TIME_NAMES: Final = ("time", "_timestamp", "timestamp", "wall_time", "wall time", "datetime", "date")


def has_step(header: Iterable[str]) -> bool:
    """Return whether a column has a usual name of the step."""
    return any(name.strip().lower() in STEP_NAMES for name in header)


def is_number_text(text: str) -> bool:
    """Return whether a cell is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class ColumnRoles:
    """The indexes of the columns with the step and the time; None where there is none."""

    step: int | None
    time: int | None

    @classmethod
    def of(cls, header: Sequence[str], source: ImportSource) -> Self:
        """Find them by their usual names, or by those that the person gave.

        Raises:
            UnreadableError: a column that was named is not there.
        """
        lower = [name.strip().lower() for name in header]
        chosen = []
        for named, usual in ((source.step_column, STEP_NAMES), (source.time_column, TIME_NAMES)):
            if named and named not in header:
                raise UnreadableError(
                    f"{source.path} has no column {named!r}; it has {', '.join(header)[:300]}"
                )
            index = header.index(named) if named else None
            if index is None:
                index = next((lower.index(name) for name in usual if name in lower), None)
            chosen.append(index)
        return cls(*chosen)

    def notes(self, skipped: int, texts: Sequence[str]) -> list[str]:
        """Say what a person who imports should know of the table."""
        notes = []
        if self.step is None:
            notes.append("There is no column with the step: rows are counted from 0. See --step-column.")
        if skipped:
            notes.append(f"{skipped:,} rows were skipped: they have no step, or another number of cells.")
        if texts:
            notes.append(f"Columns without numbers were left out: {', '.join(texts)[:200]}.")
        return notes


def plain_run(source: ImportSource, parts: Iterator[ValueTable], notes: list[str]) -> SourceRun:
    """Return the run of a file that says nothing about it."""
    stat = source.path.stat()
    source.total = stat.st_size
    return SourceRun(
        key=source.file_key(source.path),
        name=source.path.stem,
        parts=parts,
        environment={"file": source.path.name},
        created_at=None,
        notes=notes,
    )
