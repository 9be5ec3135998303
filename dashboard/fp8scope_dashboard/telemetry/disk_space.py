"""Telling a full disk from a database that is away: the one needs a person, the other only patience."""

from __future__ import annotations

import os
import time
from typing import Final

import psycopg
from django.conf import settings

DISK_FULL: Final = "53100"
"""PostgreSQL's SQLSTATE."""

LEAST_FREE: Final = 48 << 20
"""Bytes, three segments of the write-ahead log: with less, the private PostgreSQL soon cannot write."""

REMEMBERED_SECONDS: Final = 60.0

_refused_at = -REMEMBERED_SECONDS


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a failure of the database comes from its full disk, which is then remembered for a minute.

    PostgreSQL says so itself as long as it runs. When it cannot write its log it ends; of the private one the
    disk is known, so that is looked at instead.
    """
    global _refused_at
    causes = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(cause, psycopg.Error) and cause.sqlstate == DISK_FULL for cause in causes):
        _refused_at = time.monotonic()
        return True
    return any(isinstance(cause, psycopg.OperationalError) for cause in causes) and _is_private_disk_full()


def shows_full() -> bool:
    """Whether pages should warn: a write was refused within the last minute, or hardly any room is left."""
    return time.monotonic() - _refused_at < REMEMBERED_SECONDS or _is_private_disk_full()


def _is_private_disk_full() -> bool:
    """Of the private PostgreSQL, whose directory the settings name; of others it is not known."""
    if not settings.DATABASE_DIR:
        return False
    try:
        room = os.statvfs(settings.DATABASE_DIR)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < LEAST_FREE
