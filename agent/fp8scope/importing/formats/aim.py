"""Repositories of Aim: recognised, and refused with what to do.

Aim keeps metrics in RocksDB, with an encoding of its own; without Aim's libraries they cannot be read.
"""

from collections.abc import Iterator

from fp8scope.importing.model import SourceRun, UnreadableError
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath


def matches(candidate: SourcePath) -> bool:
    """The folder .aim, or one that has it."""
    return ".aim" in candidate.names or {"run_metadata.sqlite", "meta"} <= candidate.names


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Refuse the repository."""
    raise UnreadableError(
        f"{source.path} is a repository of Aim, whose metrics only Aim can read: they are in RocksDB. "
        "Write them as JSONL with Aim's Python API, and import those files: see docs/importing.md."
    )
    yield


FORMAT = FileFormat(name="aim", title="Aim (by way of JSONL)", matches=matches, read=read)
