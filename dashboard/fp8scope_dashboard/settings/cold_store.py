"""The object store that holds the values of runs which ended long ago."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.settings.days import whole_days
from fp8scope_dashboard.settings.secret_files import secret_from_environment

AFTER_DAYS: Final = 30
CACHE_MIB: Final = 1024
MAX_CACHE_MIB: Final = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ColdStoreSettings:
    """The cold store of this server.

    Attributes:
        url: as pyarrow.fs.FileSystem.from_uri reads it. It may have a secret key.
        after: how long a run must be silent before its values are moved.
        folder: for the cache of what was read, and for files that are being made.
        cache_bytes: the largest size of the cache; 0: none.
    """

    url: str = field(repr=False)
    after: timedelta = timedelta(days=AFTER_DAYS)
    folder: Path
    cache_bytes: int = CACHE_MIB << 20


def cold_store_from_environment(data_dir: Path) -> ColdStoreSettings | None:
    """The store of FP8SCOPE_COLD_STORE, with a cache below the data directory; None without one.

    Raises:
        ImproperlyConfigured: a variable is invalid. The message never contains the URL.
    """
    url = secret_from_environment("FP8SCOPE_COLD_STORE")
    if not url:
        return None
    if not re.match(r"[a-z][a-z0-9+.-]*://.", url):
        raise ImproperlyConfigured(
            "FP8SCOPE_COLD_STORE must be a URL, such as s3://bucket/folder?region=eu-west-1 or file:///folder."
        )
    size = os.environ.get("FP8SCOPE_COLD_CACHE_MIB", "").strip() or str(CACHE_MIB)
    if not re.fullmatch(r"[0-9]{1,8}", size, re.ASCII) or int(size) > MAX_CACHE_MIB:
        raise ImproperlyConfigured(
            f"FP8SCOPE_COLD_CACHE_MIB must be a whole number of MiB, at most {MAX_CACHE_MIB:,}."
        )
    return ColdStoreSettings(
        url=url,
        after=timedelta(days=whole_days("FP8SCOPE_COLD_AFTER_DAYS", AFTER_DAYS)),
        folder=data_dir / "cold_store",
        cache_bytes=int(size) << 20,
    )
