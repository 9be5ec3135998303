"""A cache of what pages have read of runs that no longer change, kept in Redis.

The number of stored rows is part of each key, so that late rows are read. A run that has just sent something
is always read, because a replica may lag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, Final, TypeVar

from django.core.cache import cache
from django.utils import timezone
from redis import RedisError

from fp8scope_dashboard.runs.models import Run, RunState

T = TypeVar("T")

SETTLED_AFTER: Final = timedelta(seconds=60)
SECONDS: Final = 24 * 3_600
# A change of what is kept needs another number.
VERSION: Final = 1


def is_settled(run: Run) -> bool:
    """Return whether the run has ended and sent nothing for a while."""
    return run.state != RunState.RUNNING and run.heartbeat_at < timezone.now() - SETTLED_AFTER


def key_of(run: Run, what: str) -> str:
    """The key of something that was read of a settled run."""
    return f"settled:{VERSION}:{run.id}:{run.rows_stored}:{what}"


def kept(keys: Collection[str]) -> dict[str, Any]:
    """Return what is kept under these keys; nothing without Redis."""
    try:
        return dict(cache.get_many(keys)) if keys else {}
    except RedisError:
        return {}


def keep(values: Mapping[str, Any]) -> None:
    """Keep values by their keys, if Redis is there."""
    try:
        if values:
            cache.set_many(dict(values), timeout=SECONDS)
    except RedisError:
        return


def kept_or_read(run: Run, what: str, read: Callable[[], T]) -> T:
    """Return what is kept of a settled run, or was just read."""
    if not is_settled(run):
        return read()
    key = key_of(run, what)
    cached = kept([key])
    if key in cached:
        value: T = cached[key]
        return value
    value = read()
    keep({key: value})
    return value
