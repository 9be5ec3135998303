"""The runs of a log directory: as in TensorBoard each directory with event files is one."""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_DEPTH: Final = 12
MAX_DIRECTORIES: Final = 20_000
MAX_RUNS: Final = 2_000
MARK: Final = "tfevents"
"""Is in the names of event files, wherever they come from."""
NOT_EVENTS: Final = (".profile-empty", ".tmp", ".gz")
NAMESPACE: Final = uuid.UUID("6a52a1c5-5a0e-4bd2-9f2d-6d2c0f5d7a11")


@dataclass(frozen=True)
class RunDirectory:
    """A directory with event files. `path` is relative to the log directory, "." for itself."""

    path: str
    files: tuple[Path, ...]


class TooManyRunsError(RuntimeError):
    """The log directory has more directories than are followed; the message says how many."""


def runs_in(root: Path, max_runs: int = MAX_RUNS) -> list[RunDirectory]:
    """Return the directories with event files below a log directory, sorted by path. Links are not followed.

    Raises:
        TooManyRunsError: there are too many of them.
    """
    runs: list[RunDirectory] = []
    waiting, seen = [(root, 0)], 0
    while waiting:
        directory, depth = waiting.pop()
        seen += 1
        if seen > MAX_DIRECTORIES or len(runs) > max_runs:
            raise TooManyRunsError(
                f"{root} has more than {max_runs:,} runs or {MAX_DIRECTORIES:,} directories: "
                "follow directories below it."
            )
        files, below = _entries(directory)
        if files:
            path = os.path.relpath(directory, root)
            runs.append(RunDirectory(path, tuple(sorted(files))))
        if depth < MAX_DEPTH:
            waiting += [(path, depth + 1) for path in below]
    return sorted(runs, key=lambda run: run.path)


def _entries(directory: Path) -> tuple[list[Path], list[Path]]:
    """The event files and the directories in a directory; none if it cannot be read."""
    files, below = [], []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(Path(entry.path))
                elif is_event_file(entry.name) and entry.is_file():
                    files.append(Path(entry.path))
    except OSError:
        return [], []
    return files, below


def is_event_file(name: str) -> bool:
    """Return whether a name is that of an event file."""
    return MARK in name and not name.endswith(NOT_EVENTS)


def run_id_of(root: Path, run: RunDirectory, scope: str) -> uuid.UUID:
    """The id of a run: the same whenever and by whichever process the directory is followed.

    It comes from the place of the directory and its first file, so that a directory which was removed and is
    used again is another run, and from `scope`: the name and the project that were asked for.
    """
    where = os.path.join(os.path.realpath(root), run.path)
    return uuid.uuid5(NAMESPACE, "\n".join((os.path.normpath(where), run.files[0].name, scope)))
