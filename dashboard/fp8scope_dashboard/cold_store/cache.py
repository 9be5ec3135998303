"""Bodies of the cold store on the local disk, by their hash, up to a number of bytes.

Processes share the folder. Each removes what was used longest ago once it has added a share of the limit. An
error of the disk costs time, not the page: then bodies are read from the store.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

logger = logging.getLogger(__name__)

# The share of the limit that a process adds before it looks at the size of the whole folder, and the share
# that it leaves then.
ADDED_SHARE: Final = 1 / 16
LEFT_SHARE: Final = 7 / 8


class BodyCache:
    """A folder with a file for each body."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        # The first body of a process makes it look.
        self._added = max_bytes
        self._lock = Lock()

    def get(self, digest: bytes) -> bytes | None:
        """Return a body as it was put; the caller checks it. None if it is not there."""
        path = self._path(digest)
        try:
            body = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return body

    def put(self, digest: bytes, body: bytes | memoryview) -> None:
        """Keep a body, if the cache can."""
        if len(body) > self._max_bytes:
            return
        try:
            self._make_room(len(body))
            path = self._path(digest)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(body)
            os.replace(file.name, path)
        except OSError as error:
            logger.warning("The cache of the cold store cannot be written: %s", error.strerror)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._added += size
            if self._added < self._max_bytes * ADDED_SHARE:
                return
            self._added = size
        files = sorted(self._files())
        total = sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in files:
            if total + size <= self._max_bytes * LEFT_SHARE:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= bytes_

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """The time of the last use, the size and the path of each file."""
        with suppress(FileNotFoundError), os.scandir(self._folder) as folders:
            for folder in folders:
                with suppress(FileNotFoundError), os.scandir(folder) as files:
                    for file in files:
                        with suppress(FileNotFoundError):
                            stat = file.stat()
                            yield stat.st_mtime, stat.st_size, file.path


@lru_cache(maxsize=2)
def cache_in(folder: Path, max_bytes: int) -> BodyCache:
    """The cache of this process in a folder."""
    return BodyCache(folder, max_bytes)
