"""Figures may be read from a replica of the database: FP8SCOPE_REPLICA_URL.

Who only reads, and can be answered again from the primary, says so with `from_replica`. The replica is asked
only while it has replayed what the primary had written a moment ago; when it lags, fails or is gone, the
primary answers. Everything else, and every write, goes to the primary.
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
# A point must be seen within two seconds of its step: so far behind the replica may be.
MOST_LAG_SECONDS = 1.0
# How long an answer to "may it be asked?" holds.
GOOD_SECONDS = 0.5
BAD_SECONDS = 5.0

# What a lagging session or membership would do to people is not worth a query saved.
APPS: Final = frozenset({"runs", "telemetry", "evaluations", "analysis", "alerts"})
# NULL from what is no replica. Of an idle primary the last transaction is old, and replayed all the same.
FRESH: Final = """
    SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn
        OR now() - pg_last_xact_replay_timestamp() < make_interval(secs => %s)
"""

_wanted: ContextVar[bool] = ContextVar("read from the replica", default=False)


class _Health:
    """Whether the replica may be asked, looked up at most once in a while by each process."""

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
        """It was asked and failed."""
        with self._lock:
            self._good, self._until = False, time.monotonic() + BAD_SECONDS


health = _Health()


@contextmanager
def from_replica() -> Iterator[None]:
    """Within this, telemetry is read from the replica where there is one that is up to date."""
    wanted = REPLICA in settings.DATABASES and health.good()
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def database() -> str:
    """The alias of the database that reads go to at this moment."""
    return REPLICA if _wanted.get() else PRIMARY


class Router:
    """Django's database router: see DATABASE_ROUTERS."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str:
        return database() if model._meta.app_label in APPS else PRIMARY

    def db_for_write(self, model: type[Model], **hints: Any) -> str:
        return PRIMARY

    def allow_relation(self, one: Model, other: Model, **hints: Any) -> bool:
        # A replica has the same rows.
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db == PRIMARY


def _is_fresh() -> bool:
    try:
        with connections[PRIMARY].cursor() as primary:
            primary.execute("SELECT pg_current_wal_flush_lsn()::text")
            (written,) = primary.fetchone()
        with connections[REPLICA].cursor() as replica:
            replica.execute(FRESH, [written, MOST_LAG_SECONDS])
            (fresh,) = replica.fetchone()
            return bool(fresh)
    except Error:
        return False
