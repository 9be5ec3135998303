"""TensorBoard's event files: recognised, and left to the command that also follows them while they grow."""

from collections.abc import Iterator

from fp8scope.event_files.log_directory import is_event_file
from fp8scope.importing.model import SourceRun, UnreadableError
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath


def matches(candidate: SourcePath) -> bool:
    """An event file, or a folder that has some."""
    if candidate.is_folder:
        return any(map(is_event_file, candidate.names))
    return is_event_file(candidate.path.name) and bool(candidate.head)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Refuse the files: two commands that make runs of them would make each run twice."""
    folder = source.path if source.path.is_dir() else source.path.parent
    raise UnreadableError(
        f"{source.path} has event files of TensorBoard: `fp8scope tail {folder} --once` sends them, and only "
        "what is new when it is called again."
    )
    yield


FORMAT = FileFormat(
    name="tensorboard", title="TensorBoard (by way of fp8scope tail)", matches=matches, read=read
)
