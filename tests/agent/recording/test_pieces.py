"""A record's payload is written in the pieces that it consists of: none of them is copied, none is lost."""

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from fp8scope.recording.records import (
    CHECKED_AT_ONCE,
    FRAME,
    Bytes,
    ExponentHistograms,
    RecordKind,
    Row,
    check_frame,
    frame,
    size_of,
)
from fp8scope.recording.segments import FileSegment, LogSegment, MemorySegment
from fp8scope.recording.spool import MAGIC, Spool

NUMBERS = st.floats(allow_nan=False)
MATRICES = nps.arrays(np.float64, nps.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=5))


def payloads(spool: Spool) -> list[bytes]:
    found, position = [], 0
    while (record := spool.read(position)) is not None:
        found.append(record.payload)
        position = record.end
    return found


def row(step: int, tensors: int = 3) -> Row:
    statistics = np.arange(tensors * 8, dtype=np.float64).reshape(tensors, 8) + step
    return Row(
        step=step,
        time_us=10 * step,
        dropped=0,
        scalars={"loss": 1.0 / step},
        statistics=statistics,
        extras={"sq_error": statistics[:, 0].copy()},
    )


def test_it_works(tmp_path: Path) -> None:
    rows = [row(number) for number in range(1, 50)]
    spool = Spool(tmp_path)
    for one in rows:
        spool.append(RecordKind.ROW, *one.pieces())
    assert payloads(spool) == [one.encode() for one in rows]
    spool.close()
    again = Spool(tmp_path)
    assert [Row.decode(payload).scalars for payload in payloads(again)] == [one.scalars for one in rows]
    again.close()


def test_a_matrix_is_written_from_where_it_lies() -> None:
    one = row(1)
    pieces = one.pieces()
    (first,) = [np.asarray(piece) for piece in pieces if isinstance(piece, memoryview)][:1]
    assert np.shares_memory(first, one.statistics)


@given(
    st.dictionaries(st.text("abcdef", min_size=1), NUMBERS, max_size=4),
    MATRICES,
    st.sampled_from(["C", "F", "strided", "big-endian"]),
)
def test_however_it_lies_in_memory(scalars: dict[str, float], matrix: np.ndarray, layout: str) -> None:
    statistics = {
        "C": matrix,
        "F": np.asfortranarray(matrix),
        "strided": np.repeat(matrix, 2, axis=1)[:, ::2],
        "big-endian": matrix.astype(">f8"),
    }[layout]
    one = Row(
        step=7,
        time_us=8,
        dropped=9,
        scalars=scalars,
        statistics=statistics,
        extras={"extra": statistics[:, 0] if matrix.shape[1] else np.zeros(0)},
    )
    if not matrix.shape[1]:
        one = Row(step=7, time_us=8, dropped=9, scalars=scalars, statistics=statistics)
    assert size_of(one.pieces()) == len(one.encode())
    read = Row.decode(one.encode())
    assert read.scalars == scalars
    np.testing.assert_array_equal(read.statistics, matrix)
    for values in read.extras.values():
        np.testing.assert_array_equal(values, matrix[:, 0])


def test_histograms_however_they_lie() -> None:
    counts = np.arange(12, dtype=np.float64).reshape(3, 4)
    for layout in (counts, np.asfortranarray(counts), np.repeat(counts, 2, axis=0)[::2]):
        read = ExponentHistograms.decode(
            ExponentHistograms(1, 2, np.arange(3, dtype=np.int32), layout).encode()
        )
        np.testing.assert_array_equal(read.counts, counts)


@pytest.mark.parametrize("make", [MemorySegment, None])
def test_pieces_are_one_after_the_other(make: type[MemorySegment] | None, tmp_path: Path) -> None:
    segment: LogSegment = make(5) if make else FileSegment(tmp_path / "x.log", 5, create=True)
    segment.append(b"ab", np.frombuffer(b"cdefghij", np.uint8).data, b"")
    segment.append(b"kl")
    assert segment.end == 17 and segment.read(5, 100) == b"abcdefghijkl"
    segment.close()


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_what_the_kernel_does_not_take_at_once_follows(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may take less than it was given, and the rest when it is asked again."""
    pwrite = os.pwrite

    def some(descriptor: int, pieces: Sequence[Bytes], at: int) -> int:
        return pwrite(descriptor, b"".join(pieces)[:most], at)

    def few(descriptor: int, data: Bytes, at: int) -> int:
        return pwrite(descriptor, memoryview(data)[: max(most, 97)], at)

    monkeypatch.setattr(os, "pwritev", some)
    monkeypatch.setattr(os, "pwrite", few)
    spool = Spool(tmp_path)
    for number in range(1, 4):
        spool.append(RecordKind.ROW, *row(number).pieces())
    monkeypatch.undo()
    assert payloads(spool) == [row(number).encode() for number in range(1, 4)]
    assert not spool.in_memory()
    spool.close()


def test_a_disk_that_fills_up_in_the_middle_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half that was written is taken back, and the record goes to memory, whole."""
    spool = Spool(tmp_path)
    spool.append(RecordKind.ROW, *row(1).pieces())
    (path,) = tmp_path.glob("*.log")
    before, pwrite = path.read_bytes(), os.pwrite

    def half(descriptor: int, pieces: Sequence[Bytes], at: int) -> int:
        data = b"".join(pieces)
        return pwrite(descriptor, data[: len(data) // 2], at)

    def full(descriptor: int, data: Bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwritev", half)
    monkeypatch.setattr(os, "pwrite", full)
    spool.append(RecordKind.ROW, *row(2).pieces())
    assert path.read_bytes() == before and before.startswith(MAGIC)
    monkeypatch.undo()
    assert spool.in_memory()
    assert payloads(spool) == [row(1).encode(), row(2).encode()]
    spool.close()


@given(st.integers(0, 3 * CHECKED_AT_ONCE + 1), st.integers(0, 3 * CHECKED_AT_ONCE))
def test_the_checksum_is_of_the_bytes_however_they_are_cut(size: int, cut: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    header = frame(RecordKind.ROW, data[:cut], memoryview(data)[cut:])
    assert FRAME.unpack(header) == (size, zlib.crc32(bytes([RecordKind.ROW]) + data), RecordKind.ROW)
    assert check_frame(header, data) is RecordKind.ROW
