"""Thinned scalars of runs. Those of runs that no longer change are kept: a comparison shows a hundred."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import numpy as np

from fp8scope_dashboard.pages.settled import is_settled, keep, kept, key_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries


def thinned_scalars(
    runs: Sequence[Run], name: str, *, first: int | None, last: int | None, points: int
) -> dict[UUID, queries.Series]:
    """A scalar of several runs without times; see `queries.scalars`."""
    what = f"{name}:{first}:{last}:{points}"
    keys = {run.id: key_of(run, what) for run in runs if is_settled(run)}
    cached = kept(keys.values())
    series = {run_id: _unpacked(*cached[key]) for run_id, key in keys.items() if key in cached}
    missing = [run.id for run in runs if run.id not in series]
    if not missing:
        return series
    read = queries.scalars(missing, name, first=first, last=last, points=points, timed=False)
    keep({keys[run_id]: _packed(line) for run_id, line in read.items() if run_id in keys})
    return {**series, **read}


def _packed(line: queries.Series) -> tuple[bytes, bytes, bool]:
    return line.steps.tobytes(), line.values.tobytes(), line.thinned


def _unpacked(steps: bytes, values: bytes, thinned: bool) -> queries.Series:
    numbers = np.frombuffer(steps, np.int64)
    no_times = np.broadcast_to(np.datetime64("NaT", "us"), numbers.shape)
    return queries.Series(numbers, np.frombuffer(values, np.float64), no_times, thinned)
