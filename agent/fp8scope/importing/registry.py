"""The formats, in the order in which they are tried, and the sources that a path has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fp8scope.importing.formats import (
    aim,
    csv_table,
    event_files,
    inspect_log,
    jsonl,
    lighteval,
    lm_eval,
    megatron,
    mlflow_files,
    mlflow_sqlite,
    neptune,
    opencompass,
    parquet,
    trackio,
    wandb,
)
from fp8scope.importing.limits import MAX_DEPTH, MAX_FILES
from fp8scope.importing.model import UnreadableError
from fp8scope.importing.source import FileFormat, SourcePath

FORMATS: Final[tuple[FileFormat, ...]] = (
    event_files.FORMAT,
    wandb.FORMAT,
    mlflow_files.FORMAT,
    mlflow_sqlite.FORMAT,
    trackio.FORMAT,
    aim.FORMAT,
    lighteval.FORMAT,
    lm_eval.FORMAT,
    neptune.FORMAT,
    opencompass.FORMAT,
    inspect_log.FORMAT,
    megatron.FORMAT,
    parquet.FORMAT,
    jsonl.FORMAT,
    csv_table.FORMAT,
)
"""The most special come first. A further reader is a module of `formats` with its FORMAT, and a line here."""


def format_named(name: str) -> FileFormat:
    """Return a format. Raises UnreadableError for a name that is none."""
    for form in FORMATS:
        if form.name == name:
            return form
    raise UnreadableError(
        f"there is no format {name!r}; there are {', '.join(form.name for form in FORMATS)}"
    )


def detect(path: Path, *, below: bool = False) -> FileFormat | None:
    """Return the format of a file or folder by its content; None if no reader knows it.

    `below`: the path is in a folder that is imported as a whole.
    """
    candidate = SourcePath(path)
    return next((form for form in FORMATS if form.recognises(candidate, below=below)), None)


def sources_of(path: Path, name: str = "") -> Iterator[tuple[Path, FileFormat]]:
    """Yield the sources at a path: the path itself, or what is below a folder that is none itself.

    `name` is the format that all of them have. Links of folders are not followed.

    Raises:
        UnreadableError: nothing there can be read; the message lists the formats.
    """
    if not path.exists():
        raise UnreadableError(f"{path} does not exist")
    form = format_named(name) if name else detect(path)
    if form is not None:
        yield path, form
        return
    count = 0
    for below, inner in _below(path, 1) if path.is_dir() else ():
        count += 1
        yield below, inner
    if not count:
        raise UnreadableError(
            f"{path} has no format that can be imported: {', '.join(form.title for form in FORMATS)}. "
            "Name one with --format to see what is wrong."
        )


def _below(folder: Path, depth: int) -> Iterator[tuple[Path, FileFormat]]:
    names = sorted(SourcePath(folder).names)
    if len(names) >= MAX_FILES:
        raise UnreadableError(f"{folder} has {MAX_FILES:,} files or more: import a part of it")
    for name in names:
        path = folder / name
        if path.is_symlink() or name.startswith("."):
            continue
        if (form := detect(path, below=True)) is not None:
            yield path, form
        elif path.is_dir() and depth < MAX_DEPTH:
            yield from _below(path, depth + 1)
