"""The records of files that grow, are torn, damaged or huge."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from agent.helpers.event_files import scalars, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as reference

from fp8scope.binary.crc32c import crc32c, masked_crcs
from fp8scope.event_files import framing
from fp8scope.event_files.framing import RecordFile


def all_of(file: RecordFile, size: int = framing.READ_BYTES) -> list[bytes]:
    records: list[bytes] = []
    while True:
        more, goes_on = file.read(size)
        records += more
        if not goes_on:
            return records


def framed(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    pieces = np.frombuffer(head + data, np.uint8)
    crcs = masked_crcs(pieces, np.array([0, 8]), np.array([8, len(data)]))
    return head + struct.pack("<I", crcs[0]) + data + struct.pack("<I", crcs[1])


def test_it_works(tmp_path: Path) -> None:
    events = [scalars(step, loss=1.0) for step in range(100)]
    path = write(tmp_path / "events", events)
    records = all_of(RecordFile(path))
    assert len(records) == 101 and records[1:] == [event.SerializeToString() for event in events]


@pytest.mark.parametrize("size", [0, 1, 3, 255, 256, 257, 1023, 1024, 1025, 1280, 4096, 70_001])
def test_checksums(size: int) -> None:
    data = os.urandom(size)
    assert crc32c(data) == reference(data)


def test_the_checksum_of_the_standard() -> None:
    """RFC 3720, appendix B.4, and the check value of the catalogue of CRCs."""
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(b"123456789") == 0xE3069283


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 3_000), max_size=12), size=st.sampled_from([64, 1_000, 1 << 20]))
def test_records_of_any_length_by_reads_of_any_size(tmp_path: Path, lengths: list[int], size: int) -> None:
    records = [os.urandom(length) for length in lengths]
    path = tmp_path / "records"
    path.write_bytes(b"".join(map(framed, records)))
    file = RecordFile(path)
    assert all_of(file, size) == records
    assert file.problem.broken_at is None and not file.problem.damaged


def test_a_record_that_is_written_in_parts_waits(tmp_path: Path) -> None:
    """Every length of a file that is written byte by byte."""
    path, whole = tmp_path / "records", framed(b"first") + framed(b"second") + framed(b"x" * 40)
    file, read = RecordFile(path), []
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        read += all_of(file)
        assert file.problem.broken_at is None
    assert read == [b"first", b"second", b"x" * 40]


def test_zeros_at_the_end_wait_for_what_is_written_there(tmp_path: Path) -> None:
    """Network file systems show a file's new length before its content."""
    path, record = tmp_path / "records", framed(b"second")
    path.write_bytes(framed(b"first") + bytes(len(record)))
    file = RecordFile(path)
    assert all_of(file) == [b"first"]
    path.write_bytes(framed(b"first") + record)
    assert all_of(file) == [b"second"] and file.problem.broken_at is None


def test_a_damaged_record_is_left_out_unless_it_is_the_last(tmp_path: Path) -> None:
    path = tmp_path / "records"
    damaged = bytearray(framed(b"second"))
    damaged[14] ^= 1
    path.write_bytes(framed(b"first") + damaged)
    file = RecordFile(path)
    assert all_of(file) == [b"first"] and file.problem.damaged == 0
    path.write_bytes(framed(b"first") + damaged + framed(b"third"))
    assert all_of(file) == [b"third"] and file.problem.damaged == 1


@pytest.mark.parametrize("length", [3, 1_000, 1 << 30, 2**63])
def test_behind_a_damaged_length_nothing_is_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "records"
    path.write_bytes(framed(b"first") + struct.pack("<QI", length, 0) + framed(b"third") * 9)
    file = RecordFile(path)
    assert all_of(file) == [b"first"] and file.problem.broken_at == len(framed(b"first"))
    assert all_of(file) == []


def test_a_huge_record_is_passed_over_without_being_read(tmp_path: Path) -> None:
    path, length = tmp_path / "records", framing.MAX_RECORD + 1
    head = struct.pack("<Q", length)
    crc = masked_crcs(np.frombuffer(head, np.uint8), np.array([0]), np.array([8]))
    with path.open("wb") as file:
        file.write(framed(b"first") + head + struct.pack("<I", crc[0]))
        file.seek(length + 4, os.SEEK_CUR)
        file.write(framed(b"last"))
    reader = RecordFile(path)
    assert all_of(reader) == [b"first", b"last"] and reader.problem.oversized == 1


def test_a_record_that_is_longer_than_a_read(tmp_path: Path) -> None:
    path, record = tmp_path / "records", os.urandom(100_000)
    path.write_bytes(framed(b"first") + framed(record) + framed(b"last"))
    assert all_of(RecordFile(path), 1_000) == [b"first", record, b"last"]


def test_mutated_files_give_records_that_were_written(tmp_path: Path) -> None:
    """2,000 files with bytes that were replaced, removed or added."""
    chance, path = random.Random(5), tmp_path / "records"
    written = [chance.randbytes(chance.randrange(60)) for _ in range(8)]
    whole = b"".join(map(framed, written))
    for _ in range(2_000):
        data, at = bytearray(whole), chance.randrange(len(whole))
        data[at : at + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
        path.write_bytes(data)
        assert set(all_of(RecordFile(path))) <= set(written)
