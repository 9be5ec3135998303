"""A file or folder that is imported: what detection looks at, and what a reader of a format gets."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from fp8scope.importing.limits import MAX_DEPTH, MAX_FILES, MAX_LINE
from fp8scope.importing.model import SourceRun, UnreadableError

HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class SourcePath:
    """A path, and what tells its format: the first bytes of a file, or the names in a folder."""

    path: Path

    @cached_property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB of a file; empty for a folder, and for what is no regular file."""
        if not self.path.is_file():
            return b""
        with self.path.open("rb") as file:
            return file.read(HEAD_BYTES)

    @cached_property
    def text(self) -> str:
        """The head as text; empty if it has a NUL byte."""
        return "" if b"\0" in self.head else self.head.decode("utf-8", "replace")

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in a folder, at most MAX_FILES; empty for a file."""
        if not self.is_folder:
            return frozenset()
        with os.scandir(self.path) as entries:
            return frozenset(entry.name for _, entry in zip(range(MAX_FILES), entries, strict=False))


@dataclass(kw_only=True)
class ImportSource:
    """A path with what the person who imports says about it, and how much of it was read.

    Attributes:
        loss: the metric that is recorded as `loss`; empty for the usual names.
        step: of evaluations whose file says none.
        step_column, time_column: of tables; empty for the usual names.
        root: the folder from which on a path names a run; None: the whole path does.
    """

    path: Path
    loss: str = ""
    step: int | None = None
    step_column: str = ""
    time_column: str = ""
    root: Path | None = None
    total: int = 0
    done: int = 0
    notes: list[str] = field(default_factory=list)

    def identity(self, path: Path) -> str:
        """The part of a path that names a run which carries no id."""
        whole = path.resolve()
        root = None if self.root is None else self.root.resolve()
        return whole.relative_to(root).as_posix() if root and whole.is_relative_to(root) else str(whole)

    def file_key(self, path: Path) -> str:
        """Identifies a file without an id: its path and its first two lines, which stay when it grows."""
        with path.open("rb") as file:
            head = file.readline(HEAD_BYTES) + file.readline(HEAD_BYTES)
        return f"{self.identity(path)} {hashlib.sha256(head).hexdigest()}"

    def lines(self, path: Path | None = None) -> Iterator[bytes]:
        """Yield the lines of a file, without their ends. Raises UnreadableError for one that is too long."""
        with (path or self.path).open("rb") as file:
            yield from self.lines_of(file)

    def lines_of(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the lines of an open file; see `lines`."""
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise UnreadableError(f"{self.path} has a line of more than {MAX_LINE >> 20} MiB")
            self.done += len(line)
            yield line.rstrip(b"\r\n")


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A kind of files. `matches` decides from the content; `read` yields the runs.

    `matches_below` decides of files in a folder that is imported as a whole: there, not each table is a run.
    """

    name: str
    title: str
    matches: Callable[[SourcePath], bool]
    read: Callable[[ImportSource], Iterator[SourceRun]]
    matches_below: Callable[[SourcePath], bool] | None = None

    def recognises(self, candidate: SourcePath, *, below: bool) -> bool:
        """Return whether the format is that of a path; `below`: of one in a folder that is imported."""
        if below and self.matches_below is not None:
            return self.matches_below(candidate)
        return self.matches(candidate)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder in a fixed order; no links of folders are followed.

    Raises:
        UnreadableError: there are more than MAX_FILES, or folders are nested deeper than MAX_DEPTH.
    """
    count = 0
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        if len(Path(parent).relative_to(folder).parts) >= MAX_DEPTH:
            raise UnreadableError(f"{folder} has folders that are nested deeper than {MAX_DEPTH}")
        for name in sorted(names):
            path = Path(parent, name)
            count += 1
            if count > MAX_FILES:
                raise UnreadableError(f"{folder} has more than {MAX_FILES:,} files: import a part of it")
            if path.is_file():
                yield path
