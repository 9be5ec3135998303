"""Opens Parquet files with pyarrow, which is only imported for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fp8scope.importing.limits import MIB
from fp8scope.importing.model import UnreadableError

MAX_FOOTER: Final = 64 * MIB
MAX_COLUMNS: Final = 20_000
MAX_ROW_GROUP: Final = 4_096 * MIB
"""Uncompressed bytes of a row group, as the file says."""


def open_parquet(path: Path) -> Any:
    """Return the open file, a `pyarrow.parquet.ParquetFile`.

    Raises:
        UnreadableError: pyarrow is missing, the file is damaged, or larger than a reader's bounds.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise UnreadableError(
            f"{path} is Parquet, which needs pyarrow: pip install 'fp8scope[import]'"
        ) from None
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 8))
        tail = file.read(8)
    if size < 12 or tail[4:] != b"PAR1" or int.from_bytes(tail[:4], "little") > min(size, MAX_FOOTER):
        raise UnreadableError(f"{path} is a damaged Parquet file: it was not written to its end")
    try:
        opened = parquet.ParquetFile(path, memory_map=False)
        names = opened.schema_arrow.names
        groups = [opened.metadata.row_group(i).total_byte_size for i in range(opened.metadata.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableError(
            f"{path} is a damaged Parquet file: {str(error).splitlines()[0][:200]}"
        ) from None
    if len(names) > MAX_COLUMNS or len(set(names)) != len(names):
        raise UnreadableError(f"{path} has more than {MAX_COLUMNS:,} columns, or two of the same name")
    if groups and max(groups) > MAX_ROW_GROUP:
        raise UnreadableError(
            f"{path} has a row group of more than {MAX_ROW_GROUP // MIB} MiB: write smaller ones"
        )
    return opened


def read_batches(file: Any, path: Path, columns: list[str], rows: int) -> Iterator[Any]:
    """Yield the record batches of some columns. Raises UnreadableError where the file is damaged."""
    import pyarrow as pa

    batches = file.iter_batches(batch_size=rows, columns=columns)
    while True:
        try:
            batch = next(batches, None)
            if batch is not None:
                # Otherwise lengths that are wrong would be found only where a value is read.
                batch.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise UnreadableError(f"{path} is a damaged Parquet file: {reason}") from None
        if batch is None:
            return
        yield batch
