"""Builds tables: from rows, as they come, or from metrics that a store keeps apart."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8scope.importing.limits import CELLS_OF_A_TABLE, MAX_SERIES_POINTS, ROWS_OF_A_TABLE
from fp8scope.importing.model import Steps, UnreadableError, Values, ValueTable
from fp8scope.importing.names import LOSS, MetricNames
from fp8scope.importing.values import flat_numbers

NO_TIME: Final = -1
MAX_KEY: Final = 2**62
_Column = tuple["array[int]", "array[float]"]
_UNKNOWN: Final[_Column] = (array("q"), array("d"))


class RowTables:
    """Collects rows. Where a table ends depends only on its rows: a file that grows keeps its tables."""

    def __init__(self, names: MetricNames, *, rank: int = 0, attempt: int = 0) -> None:
        self.names = names
        self.attempt = attempt
        self._rank = rank
        self._clear()

    def _clear(self) -> None:
        self._steps, self._times = array("q"), array("q")
        self._columns: dict[str, _Column] = {}
        self._wire: dict[str, _Column | None] = {}

    def add(self, step: int, time_us: int | None, values: Iterable[tuple[str, float]]) -> None:
        """Add a row."""
        row = len(self._steps)
        self._steps.append(step)
        self._times.append(NO_TIME if time_us is None else time_us)
        for raw, value in values:
            self._append(row, raw, value)

    def add_object(
        self, step: int, time_us: int | None, document: Mapping[str, Any], skip: tuple[Any, Any]
    ) -> None:
        """Add the numbers of a JSON object as a row, those of nested objects too; `skip` are keys without."""
        row, wire = len(self._steps), self._wire
        self._steps.append(step)
        self._times.append(NO_TIME if time_us is None else time_us)
        for raw, value in document.items():
            if type(value) is not float and type(value) is not int:
                for name, number in flat_numbers({raw: value}):
                    self._append(row, name, number)
            elif raw not in skip:
                column = wire.get(raw, _UNKNOWN)
                if column is _UNKNOWN:
                    column = self._column(raw)
                if column is not None:
                    try:
                        column[1].append(value)
                    except OverflowError:
                        continue
                    column[0].append(row)

    def _append(self, row: int, raw: str, value: float) -> None:
        column = self._wire.get(raw, _UNKNOWN)
        if column is _UNKNOWN:
            column = self._column(raw)
        if column is not None:
            column[0].append(row)
            column[1].append(value)

    @property
    def count(self) -> int:
        """The number of rows since the last table."""
        return len(self._steps)

    def add_steps(self, steps: Sequence[int], times: Sequence[int]) -> None:
        """Add rows without values; a time is NO_TIME where there is none."""
        self._steps.extend(steps)
        self._times.extend(times)

    def add_column(self, raw: str, rows: Sequence[int], values: Sequence[float]) -> None:
        """Add the values of a metric to rows that were added, in their order."""
        column = self._column(raw)
        if column is not None:
            column[0].extend(rows)
            column[1].extend(values)

    @property
    def is_full(self) -> bool:
        """Return whether the table should be taken."""
        rows = len(self._steps)
        return rows >= ROWS_OF_A_TABLE or rows * len(self._columns) >= CELLS_OF_A_TABLE

    def take(self) -> Iterator[ValueTable]:
        """Yield the rows since the last call as a table, if there are any."""
        rows = len(self._steps)
        if not rows:
            return
        steps, times = np.array(self._steps, np.int64), np.array(self._times, np.int64)
        order = np.argsort(steps, kind="stable")
        scalars: dict[str, Values] = {}
        missing: dict[str, NDArray[np.bool_]] = {}
        for name, (indexes, values) in self._columns.items():
            column, absent = np.zeros(rows), np.ones(rows, np.bool_)
            at = np.frombuffer(indexes, np.int64)
            column[at], absent[at] = np.frombuffer(values, np.float64), False
            scalars[name] = column[order]
            if absent.any():
                missing[name] = absent[order]
        if LOSS not in scalars:
            self._add_loss(scalars, missing)
        self._clear()
        yield ValueTable(
            steps=steps[order],
            times=None if (times == NO_TIME).all() else _filled(times[order]),
            scalars=scalars,
            missing=missing,
            rank=self._rank,
            attempt=self.attempt,
        )

    def _column(self, raw: str) -> _Column | None:
        if raw in self._wire:
            return self._wire[raw]
        name = self.names.of(raw)
        column = None if name is None else self._columns.setdefault(name, (array("q"), array("d")))
        if column is not None and self.names.is_loss(raw):
            self._loss = name
        if len(self._wire) < 100_000:
            self._wire[raw] = column
        return column

    _loss: str | None = None

    def _add_loss(self, scalars: dict[str, Values], missing: dict[str, NDArray[np.bool_]]) -> None:
        if self._loss in scalars:
            scalars[LOSS] = scalars[self._loss]
            if self._loss in missing:
                missing[LOSS] = missing[self._loss]


def _filled(times: Steps) -> Steps:
    """Times of rows that have none: those of the row before, or of the first that has one."""
    at = np.maximum.accumulate(np.where(times == NO_TIME, 0, np.arange(len(times))))
    filled = times[at]
    return np.where(filled == NO_TIME, times[times != NO_TIME][0], filled)


@dataclass(frozen=True)
class MetricHistory:
    """The history of a metric: steps int64[N], times int64[N] in microseconds or None, values float64[N]."""

    name: str
    steps: Steps
    times: Steps | None
    values: Values


def tables_of(metrics: Sequence[MetricHistory], names: MetricNames, *, rank: int = 0) -> Iterator[ValueTable]:
    """Yield the rows of a run whose metrics have histories of their own, in the order of the steps.

    Metrics of the same step share a row; several values of a metric at one step have a row each. The time
    of a row is that of its latest value.

    Raises:
        UnreadableError: the run has more points than can be in memory together.
    """
    points = sum(len(metric.values) for metric in metrics)
    if points > MAX_SERIES_POINTS:
        raise UnreadableError(
            f"the run has {points:,} points; at most {MAX_SERIES_POINTS:,} are read at once"
        )
    metrics = [metric for metric in metrics if len(metric.values)]
    if not metrics:
        return
    turns = [_turns(metric.steps) for metric in metrics]
    width = max(int(turn.max()) for turn in turns) + 1
    if max(int(metric.steps.max()) for metric in metrics) >= MAX_KEY // width:
        raise UnreadableError("the steps of the run are too large to tell rows apart")
    keys = [metric.steps * width + turn for metric, turn in zip(metrics, turns, strict=True)]
    rows = np.unique(np.concatenate(keys))
    times = np.full(len(rows), NO_TIME, np.int64)
    columns: dict[str, tuple[NDArray[np.int64], Values]] = {}
    for metric, key in zip(metrics, keys, strict=True):
        at = np.searchsorted(rows, key)
        if metric.times is not None:
            np.maximum.at(times, at, metric.times)
        if (name := names.of(metric.name)) is not None:
            order = np.argsort(at, kind="stable")
            columns[name] = at[order], metric.values[order]
            if names.is_loss(metric.name) and not any(other.name == LOSS for other in metrics):
                columns[LOSS] = columns[name]
    timed = None if (times == NO_TIME).all() else _filled(times)
    yield from _cut(rows // width, timed, columns, rank)


def _turns(steps: Steps) -> Steps:
    """For each value of a metric the number of its earlier values of that step, int64[N]."""
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1) != 0)
    lengths = np.diff(begins, append=len(ordered))
    turns = np.empty(len(steps), np.int64)
    turns[order] = np.arange(len(steps)) - np.repeat(begins, lengths)
    return turns


def _cut(
    steps: Steps, times: Steps | None, columns: dict[str, tuple[NDArray[np.int64], Values]], rank: int
) -> Iterator[ValueTable]:
    length = max(1, min(ROWS_OF_A_TABLE, CELLS_OF_A_TABLE // max(1, len(columns))))
    for first in range(0, len(steps), length):
        last = min(first + length, len(steps))
        scalars: dict[str, Values] = {}
        missing: dict[str, NDArray[np.bool_]] = {}
        for name, (at, values) in columns.items():
            low, high = np.searchsorted(at, (first, last))
            if low == high:
                continue
            scalars[name], absent = np.zeros(last - first), np.ones(last - first, np.bool_)
            scalars[name][at[low:high] - first] = values[low:high]
            absent[at[low:high] - first] = False
            if absent.any():
                missing[name] = absent
        part = None if times is None else times[first:last]
        yield ValueTable(steps=steps[first:last], times=part, scalars=scalars, missing=missing, rank=rank)
