"""Files in an object store, each operation in bounded time.

A store that has not answered is left alone for some seconds, so that a page with many charts waits once. The
operations run in threads, because the clients of object stores have no deadlines of their own; the thread of
an operation that has no time left ends by itself later.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from django.conf import settings

from fp8scope_dashboard.cold_store.errors import ColdStoreAwayError, ColdValuesLostError
from fp8scope_dashboard.settings.cold_store import ColdStoreSettings

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# An operation has these seconds, and those that its bytes take at the slowest rate that is borne.
SECONDS: Final = 5.0
MIN_READ_RATE: Final = 4 << 20
MIN_WRITE_RATE: Final = 1 << 19
# How long a store that did not answer is not asked again.
PAUSE_SECONDS: Final = 10.0
MAX_THREADS: Final = 8
PIECE_BYTES: Final = 1 << 20
MAX_LOGGED: Final = 300
PART: Final = ".part"
"""The end of the name of a local file that is being written."""

_threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="cold-store")


@dataclass(frozen=True)
class StoredFile:
    """A file of the store."""

    name: str
    bytes: int
    written_at: datetime | None


@dataclass(frozen=True)
class FileRange:
    """Neighbouring bytes of a file."""

    name: str
    offset: int
    size: int


def configured() -> ColdStoreSettings:
    """The settings of the cold store.

    Raises:
        ColdStoreAwayError: FP8SCOPE_COLD_STORE is not set.
    """
    chosen: ColdStoreSettings | None = settings.COLD_STORE
    if chosen is None:
        raise ColdStoreAwayError("is not set up: FP8SCOPE_COLD_STORE is empty")
    return chosen


def object_store() -> ObjectStore:
    """The store of FP8SCOPE_COLD_STORE; errors as `configured`."""
    return _store_at(configured().url)


class ObjectStore:
    """The files in the folder of a URL. Methods raise ColdStoreAwayError if the store does not answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: tuple[FileSystem, str] | None = None
        self._opening = Lock()
        self._rests_until = 0.0

    def read(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """Read ranges at once.

        Raises:
            ColdValuesLostError: a file is missing or too short.
        """
        seconds = SECONDS + sum(wanted.size for wanted in ranges) / MIN_READ_RATE
        return self._in_time([partial(self._read, wanted) for wanted in ranges], seconds)

    def put(self, name: str, content: BinaryIO, size: int, digest: bytes) -> None:
        """Write a file and read it back. A file that is there with this content stays as it is.

        Raises:
            ColdValuesLostError: what is read is not what was written.
        """
        if self.digest_of(name, size) == digest:
            return
        self._in_time([partial(self._write, name, content)], SECONDS + size / MIN_WRITE_RATE)
        if self.digest_of(name, size) != digest:
            raise ColdValuesLostError(f"has not stored the file {name} as it was written")

    def digest_of(self, name: str, size: int) -> bytes | None:
        """The SHA-256 of a file of about `size` bytes; None if there is none."""
        return self._in_time([partial(self._digest, name)], SECONDS + size / MIN_READ_RATE)[0]

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        self._in_time([partial(self._delete, name)], SECONDS)

    def files(self, seconds: float) -> list[StoredFile]:
        """List all files of the folder within some seconds."""
        return self._in_time([self._list], seconds)[0]

    def _in_time(self, calls: Sequence[Callable[[], Result]], seconds: float) -> list[Result]:
        """Run calls in threads, and wait until all have returned."""
        deadline = time.monotonic() + seconds
        if time.monotonic() < self._rests_until:
            raise ColdStoreAwayError("does not answer")
        asked = [_threads.submit(call) for call in calls]
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in asked]
        except (OSError, pa.ArrowException) as error:  # a TimeoutError is an OSError
            self._rests_until = time.monotonic() + PAUSE_SECONDS
            logger.warning("The cold store does not answer: %s", self._without_secrets(error))
            raise ColdStoreAwayError("does not answer") from None
        finally:
            for future in asked:
                future.cancel()

    def _without_secrets(self, error: Exception) -> str:
        """The first line of an error without the URL and its user and password."""
        text = (str(error) or f"no answer in time ({type(error).__name__})").partition("\n")[0]
        try:
            user, _, rest = urlsplit(self._url).netloc.rpartition("@")[0].partition(":")
        except ValueError:
            return type(error).__name__
        for secret in filter(None, (self._url, user, rest, unquote(user), unquote(rest))):
            text = text.replace(secret, "[redacted]")
        return text[:MAX_LOGGED]

    def _located(self, name: str) -> tuple[FileSystem, str]:
        """The file system and a path on it. Opening one may ask the store, so it happens in a thread."""
        # It loads the clients of all object stores, which most installations do not use.
        from pyarrow.fs import FileSystem

        with self._opening:
            if self._opened is None:
                self._opened = FileSystem.from_uri(self._url)
            system, folder = self._opened
        return system, f"{folder.rstrip('/')}/{name}"

    def _read(self, wanted: FileRange) -> bytes:
        system, path = self._located(wanted.name)
        try:
            with system.open_input_file(path) as file:
                file.seek(wanted.offset)
                body = bytes(file.read(wanted.size))
        except FileNotFoundError:
            raise ColdValuesLostError(f"lacks the file {wanted.name}") from None
        if len(body) != wanted.size:
            raise ColdValuesLostError(f"has only the beginning of the file {wanted.name}")
        return body

    def _write(self, name: str, content: BinaryIO) -> None:
        system, path = self._located(name)
        content.seek(0)
        if system.type_name == "local":
            _write_durably(Path(path), content)
            return
        with system.open_output_stream(path) as sink:
            shutil.copyfileobj(content, sink, PIECE_BYTES)

    def _digest(self, name: str) -> bytes | None:
        system, path = self._located(name)
        digest = sha256()
        try:
            with system.open_input_stream(path) as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
        except FileNotFoundError:
            return None
        return digest.digest()

    def _delete(self, name: str) -> None:
        system, path = self._located(name)
        # Of a missing file, S3 and a local folder raise different errors.
        for info in system.get_file_info([path, path + PART]):
            if info.is_file:
                system.delete_file(info.path)

    def _list(self) -> list[StoredFile]:
        from pyarrow.fs import FileSelector

        system, folder = self._located("")
        infos = system.get_file_info(FileSelector(folder.rstrip("/"), allow_not_found=True))
        return [StoredFile(info.base_name, int(info.size or 0), info.mtime) for info in infos if info.is_file]


def _write_durably(path: Path, content: BinaryIO) -> None:
    """Write a local file so that it is whole or missing, also after the machine has failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + PART)
    with part.open("wb") as file:
        shutil.copyfileobj(content, file, PIECE_BYTES)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@lru_cache(maxsize=2)
def _store_at(url: str) -> ObjectStore:
    return ObjectStore(url)
