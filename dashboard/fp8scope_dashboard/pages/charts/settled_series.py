"""Thinned scalars of runs that no longer change, kept in Redis: a comparison shows those of a hundred runs.

The number of stored rows is part of the key, so that late rows are read. A run that has just sent something
is always read, because a replica may lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from uuid import UUID

import numpy as np
from django.core.cache import cache
from django.utils import timezone
from redis import RedisError

from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries

SETTLED_AFTER: Final = timedelta(seconds=60)
SECONDS: Final = 24 * 3_600
# A change of what is kept needs another number.
VERSION: Final = 1


def thinned_scalars(
    runs: Sequence[Run], name: str, *, first: int | None, last: int | None, points: int
) -> dict[UUID, queries.Series]:
    """A scalar of several runs without times; see `queries.scalars`."""
    since = timezone.now() - SETTLED_AFTER
    settled = [run for run in runs if run.state != RunState.RUNNING and run.heartbeat_at < since]
    keys = {run.id: _key(run, name, first, last, points) for run in settled}
    kept = _kept(list(keys.values()))
    series = {run_id: kept[key] for run_id, key in keys.items() if key in kept}
    missing = [run.id for run in runs if run.id not in series]
    if not missing:
        return series
    read = queries.scalars(missing, name, first=first, last=last, points=points, timed=False)
    _keep({keys[run_id]: line for run_id, line in read.items() if run_id in keys})
    return {**series, **read}


def _key(run: Run, name: str, first: int | None, last: int | None, points: int) -> str:
    return f"series:{VERSION}:{run.id}:{run.rows_stored}:{name}:{first}:{last}:{points}"


def _kept(keys: list[str]) -> dict[str, queries.Series]:
    """What is kept; nothing without Redis."""
    try:
        stored = cache.get_many(keys) if keys else {}
    except RedisError:
        return {}
    return {key: _unpacked(*value) for key, value in stored.items()}


def _keep(lines: dict[str, queries.Series]) -> None:
    if not lines:
        return
    try:
        cache.set_many({key: _packed(line) for key, line in lines.items()}, timeout=SECONDS)
    except RedisError:
        return


def _packed(line: queries.Series) -> tuple[bytes, bytes, bool]:
    return line.steps.tobytes(), line.values.tobytes(), line.thinned


def _unpacked(steps: bytes, values: bytes, thinned: bool) -> queries.Series:
    numbers = np.frombuffer(steps, np.int64)
    no_times = np.broadcast_to(np.datetime64("NaT", "us"), numbers.shape)
    return queries.Series(numbers, np.frombuffer(values, np.float64), no_times, thinned)
