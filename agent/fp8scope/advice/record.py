"""A recorded run as the checks see it: the measurements of each rank's steps, and what is known of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8scope.observe.timing.anatomy import PARTS, scalar_of
from fp8scope.recording.records import RecordKind, Row, load_json
from fp8scope.recording.spool import Spool, find_spools

Floats = NDArray[np.float64]
WARM_UP: Final = 5
"""The first measured steps are left out: they compile, allocate and start workers."""
MIN_STEPS: Final = 10
"""Fewer measured steps are no evidence."""
COMPILES: Final = 10
"""A step whose passes take this many times the median compiles something again, e.g. for another shape."""
COMPILE_SECONDS: Final = 0.25
"""It takes at least so much longer. In shorter steps, a pause of the machine is as long."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank. `scalars`: float64 [steps] by name, NaN where a step has none; `facts`: `observe.facts`."""

    rank: int = 0
    scalars: Mapping[str, Floats] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def values(self, name: str) -> Floats:
        """Return the known values of a scalar."""
        values = self.scalars.get(name, np.zeros(0))
        return values[np.isfinite(values)]

    @property
    def seconds(self) -> Floats:
        """The time of each measured step, without the first ones and those that compile: float64 [steps]."""
        seconds: Floats = np.sum([self.part(name) for name in PARTS], axis=0)
        return seconds

    @property
    def is_measured(self) -> bool:
        """Return whether there are enough steps to say something about their time."""
        return len(self.seconds) >= MIN_STEPS

    def part(self, name: str) -> Floats:
        """Return the seconds of a part of the anatomy in the steps of `seconds`: float64 [steps]."""
        forward = self.scalars.get(scalar_of("forward"), np.zeros(0))
        measured = np.flatnonzero(np.isfinite(forward))[WARM_UP:]
        passes = forward[measured] + np.nan_to_num(self._scalar("backward")[measured])
        if len(measured):
            usual = float(np.median(passes))
            measured = measured[passes <= max(COMPILES * usual, usual + COMPILE_SECONDS)]
        return np.nan_to_num(self._scalar(name)[measured])

    def _scalar(self, name: str) -> Floats:
        """Return the seconds of a part in all steps: float64 [steps], 0 if the run has no such part."""
        steps = len(self.scalars.get(scalar_of("forward"), ()))
        return self.scalars.get(scalar_of(name), np.zeros(steps))

    def share(self, *names: str) -> float:
        """Return the share of parts of the anatomy in the time of all steps; 0 without steps."""
        whole = float(self.seconds.sum())
        return sum(float(self.part(name).sum()) for name in names) / whole if whole > 0 else 0.0

    def typical_share(self, *names: str) -> float:
        """Return the median over the steps of the parts' share in a step; 0 without steps."""
        whole = self.seconds
        if not len(whole) or not whole.all():
            return 0.0
        shares: Floats = np.sum([self.part(name) for name in names], axis=0) / whole
        return float(np.median(shares))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All ranks of a run, by rank. `world_size` is the number of ranks that the launcher has started."""

    ranks: Sequence[RankRecord]
    world_size: int = 1

    @property
    def first(self) -> RankRecord:
        return self.ranks[0]

    def typical(self, *parts: str) -> float:
        """Return the median over the ranks of a share of the steps' time."""
        return median(rank.share(*parts) for rank in self.ranks)


class NothingRecordedError(ValueError):
    """There is no run in the folder, or it has no step."""


class SeveralRunsError(ValueError):
    """The folder has more than one run."""


def rank_of(registration: Mapping[str, Any], rows: Iterable[Row]) -> RankRecord:
    """Return the record of a rank from its registration and the rows of its steps."""
    # The row of a step that was repeated after a restart replaces the earlier one.
    by_step = {row.step: row.scalars for row in rows}
    steps = [by_step[step] for step in sorted(by_step)]
    names = {name for scalars in steps for name in scalars}
    environment = registration.get("environment") or {}
    return RankRecord(
        rank=_number(environment.get("rank"), 0),
        scalars={name: np.array([scalars.get(name, np.nan) for scalars in steps]) for name in names},
        facts=environment.get("training") or {},
    )


def read_spools(directory: Path) -> RunRecord:
    """Read the run whose spools lie at or below `directory`. Raises NothingRecordedError without a step.

    Ranks that no launcher has told of each other have a run each, and are one here. Two runs of the same rank
    are not: SeveralRunsError. Raises SpoolBusyError while a process writes.
    """
    runs: dict[int, str] = {}
    registrations: dict[int, dict[str, Any]] = {}
    rows: dict[int, list[Row]] = {}
    for folder in find_spools(directory):
        registration, own = _read(folder)
        if not own:
            continue
        rank, run = _number(registration["environment"].get("rank"), 0), folder.parent.name
        if runs.setdefault(rank, run) != run:
            raise SeveralRunsError(f"{directory} has several runs: name the folder of one, such as {run}.")
        # A restarted process has a spool of its own.
        rows.setdefault(rank, []).extend(own)
        if "training" in registration["environment"] or rank not in registrations:
            registrations[rank] = registration
    if not rows:
        raise NothingRecordedError(f"no step of a run is recorded in {directory}.")
    sizes = [_number(described["environment"].get("world_size"), 1) for described in registrations.values()]
    return RunRecord(
        ranks=[rank_of(registrations[rank], rows[rank]) for rank in sorted(rows)], world_size=max(sizes)
    )


def _read(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the last registration and the rows of a spool."""
    spool = Spool(folder)
    registration: dict[str, Any] = {"environment": {}}
    rows, position = [], 0
    try:
        while (record := spool.read(position)) is not None:
            position = record.end
            if record.kind is RecordKind.REGISTRATION:
                registration = load_json(record.payload)
            elif record.kind is RecordKind.ROW:
                rows.append(Row.decode(record.payload))
    finally:
        spool.close()
    return registration, rows


def _number(text: Any, default: int) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        return default
