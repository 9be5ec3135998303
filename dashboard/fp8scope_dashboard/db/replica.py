"""Route reads of figures to a read replica (FP8SCOPE_REPLICA_URL).

Code that only reads, and can be repeated on the primary, runs within `from_replica`. The replica serves it
while it is up to date; if it lags or fails, the primary does. All writes and all other reads use the primary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from django.conf import settings
from django.db import Error, connections
from django.db.models import Model

PRIMARY: Final = "default"
REPLICA: Final = "replica"
# A point must be visible within two seconds of its step.
MAX_LAG_SECONDS = 1.0
# How long the result of a health check is valid.
GOOD_SECONDS = 0.5
BAD_SECONDS = 5.0

# Not accounts: a lagging session or membership would confuse users.
APPS: Final = frozenset({"runs", "telemetry", "evaluations", "analysis", "alerts"})
# NULL on a server that is not a replica. If the primary is idle, its last transaction is old but replayed.
FRESH: Final = """
    SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn
        OR now() - pg_last_xact_replay_timestamp() < make_interval(secs => %s)
"""

_wanted: ContextVar[bool] = ContextVar("read from the replica", default=False)


class _Health:
    """Caches whether the replica is up to date, per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._good = False

    def good(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if now >= self._until:
                self._good = _is_fresh()
                self._until = time.monotonic() + (GOOD_SECONDS if self._good else BAD_SECONDS)
            return self._good

    def failed(self) -> None:
        """Record that a query on the replica failed."""
        with self._lock:
            self._good, self._until = False, time.monotonic() + BAD_SECONDS


health = _Health()


@contextmanager
def from_replica() -> Iterator[None]:
    """Read telemetry from the replica within the context, if it is up to date."""
    wanted = REPLICA in settings.DATABASES and health.good()
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def database() -> str:
    """The alias of the database for reads in the current context."""
    return REPLICA if _wanted.get() else PRIMARY


class Router:
    """Database router; see DATABASE_ROUTERS."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str:
        return database() if model._meta.app_label in APPS else PRIMARY

    def db_for_write(self, model: type[Model], **hints: Any) -> str:
        return PRIMARY

    def allow_relation(self, obj1: Model, obj2: Model, **hints: Any) -> bool:
        # The replica has the same rows.
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db == PRIMARY


def _is_fresh() -> bool:
    try:
        with connections[PRIMARY].cursor() as primary:
            primary.execute("SELECT pg_current_wal_flush_lsn()::text")
            (written,) = primary.fetchone()
        with connections[REPLICA].cursor() as replica:
            replica.execute(FRESH, [written, MAX_LAG_SECONDS])
            (fresh,) = replica.fetchone()
            return bool(fresh)
    except Error:
        return False
