"""Distinguish a full disk, which needs a person, from a database that is down and may recover."""

from __future__ import annotations

import os
import time
from typing import Final

import psycopg
from django.conf import settings

DISK_FULL: Final = "53100"
"""The SQLSTATE of PostgreSQL."""

MIN_FREE_BYTES: Final = 48 << 20
"""Three segments of the write-ahead log. With less, the embedded PostgreSQL soon cannot write."""

REMEMBERED_SECONDS: Final = 60.0

_refused_at = -REMEMBERED_SECONDS


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused a database error. Remembers it for `shows_full`.

    A running PostgreSQL reports it. If it cannot write its log, it stops; for the embedded PostgreSQL, the
    free space of its directory is checked instead.
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
    """Return whether pages should warn.

    A write failed within the last minute, or hardly any space is left.
    """
    return time.monotonic() - _refused_at < REMEMBERED_SECONDS or _is_private_disk_full()


def _is_private_disk_full() -> bool:
    """Check the free space of the embedded PostgreSQL; False for other servers, where it is unknown."""
    if not settings.DATABASE_DIR:
        return False
    try:
        disk = os.statvfs(settings.DATABASE_DIR)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES
