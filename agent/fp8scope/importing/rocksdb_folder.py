"""Opens RocksDB folders with aimrocks, which is only imported for them. Nothing is written to them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from fp8scope.importing.limits import MAX_DOCUMENT, MAX_FILES, MIB
from fp8scope.importing.model import UnreadableError

Item = tuple[bytes, bytes]
FIRST_BLOCK: Final = 64
LAST_BLOCK: Final = 16_384
BLOCK_BYTES: Final = 16 * MIB


class RocksFolder:
    """An open folder: keys and values in the order of the keys."""

    def __init__(self, iterator: Any, path: Path) -> None:
        # Of the whole folder: to make an iterator, RocksDB puts all deleted ranges in order.
        self._iterator = iterator
        self._path = path

    def blocks(self, prefix: bytes) -> Iterator[Sequence[Item]]:
        """Yield the items whose keys begin with a prefix, in blocks.

        Raises:
            UnreadableError: the folder is damaged.
        """
        length, start = FIRST_BLOCK, prefix
        while True:
            block = self._read(start, length)
            inside = bisect_left(block, True, key=lambda item: not item[0].startswith(prefix))
            if inside:
                yield block[:inside]
            if inside < length:
                return
            start = block[-1][0] + b"\0"
            size = max(1, sum(map(len, map(itemgetter(1), block))) // length)
            length = max(1, min(4 * length, LAST_BLOCK, BLOCK_BYTES // size))

    def _read(self, start: bytes, length: int) -> list[Item]:
        """The next items from a key on."""
        with _as_unreadable(self._path):
            self._iterator.seek(start)
            return list(islice(self._iterator, length))


def require_aimrocks(path: Path) -> None:
    """Raise UnreadableError where aimrocks is missing, without which a path cannot be read."""
    try:
        import aimrocks  # noqa: F401
    except ImportError:
        raise UnreadableError(
            f"{path} is RocksDB, which needs aimrocks (Python 3.11 or 3.12): pip install 'fp8scope[aim]'"
        ) from None


@contextmanager
def open_rocksdb(path: Path) -> Iterator[RocksFolder]:
    """Open a folder as it is now, with what its writer has not yet moved from the log into tables.

    Raises:
        UnreadableError: aimrocks is missing, or the folder is damaged or larger than a reader's bounds.
    """
    require_aimrocks(path)
    import aimrocks

    _check_size(path)
    with _as_unreadable(path):
        options = aimrocks.Options(create_if_missing=False, max_open_files=-1)
        database = aimrocks.DB(str(path), options, read_only=True)
        folder = RocksFolder(database.iteritems(), path)
    try:
        yield folder
    finally:
        # The iterator first, even of a folder that is in a cycle, or freeing it would end the process. The
        # database not with close(): aimrocks 0.5 frees what was closed a second time.
        del folder._iterator
        del database


def _check_size(path: Path) -> None:
    """Refuse a log that would not fit into memory, where RocksDB reads it as a whole."""
    logs = 0
    try:
        for count, file in enumerate(path.iterdir()):
            logs += file.stat().st_size if file.suffix == ".log" else 0
            if count >= MAX_FILES or logs > MAX_DOCUMENT:
                raise UnreadableError(
                    f"{path} has {MAX_FILES:,} files, or logs of more than {MAX_DOCUMENT // MIB} MiB: "
                    "let the tool that wrote it open it once"
                )
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read as RocksDB: {error.strerror}") from None


@contextmanager
def _as_unreadable(path: Path) -> Iterator[None]:
    from aimrocks import errors

    kinds = (
        *(errors.Corruption, errors.Incomplete, errors.InvalidArgument, errors.MergeInProgress),
        *(errors.NotFound, errors.NotSupported, errors.RocksIOError),
    )
    try:
        yield
    except (*kinds, MemoryError, UnicodeError) as error:
        reason = str(error)[:200] or type(error).__name__
        raise UnreadableError(
            f"{path} cannot be read as RocksDB: {reason}. If a run was being written to it, import again."
        ) from None
