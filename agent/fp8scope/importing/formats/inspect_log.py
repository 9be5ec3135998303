"""Statistics logs of Transformer Engine (nvdlfw-inspect): a line for each tensor, statistic and iteration.

`2025-01-01 12:00:00,000 - INFO - decoder.1.qkv_activation_amax  iteration=000010  value=3.1250`
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from fp8scope.importing.limits import CELLS_OF_A_TABLE, MAX_TENSORS, ROWS_OF_A_TABLE
from fp8scope.importing.model import SourceRun, SourceTensor, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.tables import RowTables
from fp8scope.importing.values import FIRST_TIME, LAST_TIME, MAX_STEP

_LINE: Final = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - \w+ - \S.*\s+iteration=\d+\s+value=\S+\s*$"
)
_RANK: Final = re.compile(r"_globalrank-(\d{1,7})\.log$")
_TENSOR: Final = re.compile(
    r"(?P<module>.+)_(?P<tensor>activation|weight|gradient|output|wgrad|dgrad)_(?P<stat>.+)"
)
ROLES: Final = {
    "activation": "input",
    "weight": "weight",
    "gradient": "grad_output",
    "output": "output",
    "wgrad": "weight_grad",
    "dgrad": "grad_input",
}
_RENAMED: Final = {"cur_amax": "amax", "scale_inv_max": "scale_min", "scale_inv_min": "scale_max"}
_SHARES: Final = (("underflows%", "underflow"), ("overflows%", "saturated"), ("saturations%", "saturated"))
"""Percentages of elements. They become counts of one element, so that the rate is that of the log."""
MAX_STATISTICS: Final = 30
MAX_NAMES: Final = 200_000


def matches(candidate: SourcePath) -> bool:
    """A line of statistics among the first."""
    return any(_LINE.match(line) for line in candidate.text.splitlines()[:20])


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of which the file is one rank."""
    source.total = source.path.stat().st_size
    rank = int(match[1]) if (match := _RANK.search(source.path.name)) else 0
    first = source.path.with_name(_RANK.sub("_globalrank-0.log", source.path.name))
    notes: list[str] = []
    yield SourceRun(
        key=source.file_key(first if first.is_file() else source.path),
        name=_name_of(source.path),
        parts=_parts(source, rank, notes),
        environment={"folder": source.path.resolve().parent.name},
        precision="fp8",
        notes=notes,
    )


def _name_of(path: Path) -> str:
    parents = [part for part in path.resolve().parent.parts if "nvdlfw_inspect" not in part and part != "/"]
    return parents[-1] if parents else path.stem


@dataclass(frozen=True)
class _Target:
    """The tensor and the statistic that the values of one name belong to, and what they are multiplied by."""

    tensor: int
    statistic: str
    factor: float = 1.0
    is_inverse: bool = False


class _Steps:
    """The statistics of the steps since the last table."""

    def __init__(self, rank: int, names: MetricNames) -> None:
        self.tensors: list[SourceTensor] = []
        self._rank = rank
        self._indexes: dict[str, int] = {}
        self._statistics: set[str] = set()
        self._targets: dict[str, _Target | None] = {}
        self._clear()
        self.scalars = RowTables(names, rank=rank)
        self.left_out = 0

    def _clear(self) -> None:
        self._steps: list[int] = []
        self._times: list[int] = []
        self._cells: dict[str, tuple[list[int], list[int], list[float]]] = {}

    def add(self, name: str, step: int, time_us: int, value: float) -> bool:
        """Add a value; returns whether it is that of a tensor."""
        try:
            target = self._targets[name]
        except KeyError:
            target = self._target(name)
        if target is None:
            return False
        if not self._steps or self._steps[-1] != step:
            self._steps.append(step)
            self._times.append(time_us)
        if target.is_inverse:
            if value == 0.0:
                return True
            value = 1.0 / value
        rows, tensors, values = self._cells.setdefault(target.statistic, ([], [], []))
        rows.append(len(self._steps) - 1)
        tensors.append(target.tensor)
        values.append(value * target.factor)
        return True

    @property
    def is_full(self) -> bool:
        """Return whether the table should be taken, before a further step begins."""
        rows = len(self._steps)
        return rows >= ROWS_OF_A_TABLE or rows * len(self.tensors) * len(self._cells) >= CELLS_OF_A_TABLE

    def is_new(self, step: int) -> bool:
        """Return whether a value begins a step."""
        return bool(self._steps) and step != self._steps[-1]

    def take(self) -> Iterator[ValueTable]:
        """Yield the steps as a table."""
        if not self._steps:
            return
        shape = len(self._steps), len(self.tensors)
        statistics = {name: np.full(shape, np.nan) for name in self._cells}
        for name, (rows, tensors, values) in self._cells.items():
            statistics[name][rows, tensors] = values
        if {"underflow", "saturated"} & statistics.keys():
            shares = [
                ~np.isnan(statistics[name]) for name in ("underflow", "saturated") if name in statistics
            ]
            statistics["numel"] = np.where(np.any(shares, axis=0), 1.0, np.nan)
        order = np.argsort(self._steps, kind="stable")
        steps, times = np.array(self._steps, np.int64)[order], np.array(self._times, np.int64)[order]
        self._clear()
        yield ValueTable(
            steps=steps,
            times=times,
            scalars={},
            statistics={name: matrix[order] for name, matrix in statistics.items()},
            tensors=tuple(self.tensors),
            rank=self._rank,
        )

    def _target(self, name: str) -> _Target | None:
        if len(self._targets) >= MAX_NAMES:
            raise UnreadableError(f"the log has more than {MAX_NAMES:,} names")
        match = _TENSOR.fullmatch(name)
        target = None
        if match is not None:
            tensor = self._tensor(match["module"], ROLES[match["tensor"]])
            statistic, factor = _statistic_of(match["stat"])
            if tensor is None or (
                statistic not in self._statistics and len(self._statistics) >= MAX_STATISTICS
            ):
                self.left_out += 1
            else:
                self._statistics.add(statistic)
                target = _Target(tensor, statistic, factor, match["stat"].startswith("scale_inv_m"))
        self._targets[name] = target
        return target

    def _tensor(self, module: str, role: str) -> int | None:
        name = f"{module}.{role}"[:512]
        if name not in self._indexes:
            if len(self.tensors) >= MAX_TENSORS:
                return None
            self._indexes[name] = len(self.tensors)
            self.tensors.append(SourceTensor(name=name, module=module[:512], role=role))
        return self._indexes[name]


def _statistic_of(stat: str) -> tuple[str, float]:
    """The name of a statistic on the wire, and what its values are multiplied by."""
    if stat in _RENAMED:
        return _RENAMED[stat], 1.0
    for ending, name in _SHARES:
        if stat.endswith(ending):
            return name, 0.01
    name = re.sub(r"[^a-z0-9_]", "_", stat.lower().replace("%", "_share"))[:32]
    return (name if re.match("[a-z]", name) else f"s_{name}"[:32]), 0.01 if stat.endswith("%") else 1.0


def _parts(source: ImportSource, rank: int, notes: list[str]) -> Iterator[ValueTable]:
    names = MetricNames(source.loss)
    steps, broken = _Steps(rank, names), 0
    clock = _Clock()
    for line in source.lines():
        name, step, value = _value_in(line)
        time_us = clock.micros(line[:23])
        if name is None or time_us is None or not 0 <= step <= MAX_STEP:
            broken += bool(line)
            continue
        if steps.is_new(step) and steps.is_full:
            yield from steps.take()
        if not steps.add(name, step, time_us, value):
            steps.scalars.add(step, time_us, [(name, value)])
            if steps.scalars.is_full:
                yield from steps.scalars.take()
    yield from steps.take()
    yield from steps.scalars.take()
    notes += names.notes()
    if broken:
        notes.append(f"{broken:,} lines were left out: they have no name, iteration and value.")
    if steps.left_out:
        notes.append(
            f"{steps.left_out:,} statistics were left out: a run has at most {MAX_TENSORS:,} tensors."
        )


def _value_in(line: bytes) -> tuple[str | None, int, float]:
    """The name, iteration and value of a line; None for a line of another kind."""
    words = line.split()
    if len(words) == 8 and words[6][:10] == b"iteration=" and words[7][:6] == b"value=":
        # The usual form: the date, the time, a level and a name, with dashes between.
        try:
            return words[5].decode(), int(words[6][10:]), float(words[7][6:])
        except ValueError:
            return None, 0, 0.0
    head, mark, tail = line.partition(b"iteration=")
    number, other, text = tail.partition(b"value=")
    begin = head.find(b" - ", head.find(b" - ") + 3)
    if not mark or not other or begin < 0:
        return None, 0, 0.0
    try:
        step, value = int(number), float(text)
        name = head[begin + 3 :].strip().decode()
    except ValueError:
        return None, 0, 0.0
    return (name or None), step, value


class _Clock:
    """Reads the times of lines; those of one second share its calendar."""

    def __init__(self) -> None:
        self._second = b""
        self._micros: int | None = None

    def micros(self, text: bytes) -> int | None:
        """Microseconds since 1970 of `2025-01-01 12:00:00,000`, taken for UTC; None for no such text."""
        second, comma, fraction = text[:19], text[19:20], text[20:23]
        if second != self._second:
            self._second, self._micros = second, None
            try:
                moment = datetime.strptime(second.decode("ascii"), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
            except ValueError:
                return None
            if FIRST_TIME <= moment.timestamp() <= LAST_TIME:
                self._micros = round(moment.timestamp() * 1e6)
        if self._micros is None or comma != b"," or not fraction.isdigit():
            return None
        return self._micros + int(fraction) * 1_000


FORMAT = FileFormat(name="te-inspect", title="Transformer Engine statistics log", matches=matches, read=read)
