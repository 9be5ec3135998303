"""The readers of LevelDB's log and of protocol buffers, and the bounds of both."""

from __future__ import annotations

import io

import pytest
from agent.helpers.import_files import leveldb, message

from fp8scope.binary.protobuf import signed
from fp8scope.importing import binary
from fp8scope.importing.binary import TornError, fields, log_records, varint
from fp8scope.importing.model import UnreadableError

SIZES = (0, 1, 6, 7, 100, 32_753, 32_754, 32_755, 32_761, 32_768, 100_000)


def read(data: bytes, offset: int = 7) -> list[bytes]:
    return list(log_records(io.BytesIO(data), offset))


def test_it_works() -> None:
    records = [bytes([i % 251]) * size for i, size in enumerate(SIZES * 3)]
    for offset in (0, 7):
        assert read(leveldb(records, offset), offset) == records


def test_a_log_that_was_cut_off_is_read_to_the_last_record() -> None:
    records = [b"a" * 1_000, b"b" * 70_000, b"c" * 10]
    log = leveldb(records, 7)
    for end in (1_020, 20_000, 50_000, len(log) - 1):
        taken = []
        with pytest.raises(TornError, match="ends inside of a record"):
            for record in log_records(io.BytesIO(log[:end]), 7):
                taken.append(record)
        assert taken == records[: len(taken)]


def test_a_cut_at_any_byte_is_told_but_between_records() -> None:
    """A cut inside of the seven bytes before a record's data, too."""
    log = leveldb([b"a" * 20, b"b" * 20], 0)
    whole = {0, 27, 54}
    for end in range(len(log) + 1):
        if end in whole:
            assert len(read(log[:end], 0)) == end // 27
        else:
            with pytest.raises(TornError):
                read(log[:end], 0)


def test_a_damaged_record_is_refused() -> None:
    log = bytearray(leveldb([b"a" * 100, b"b" * 100], 7))
    log[50] ^= 1
    with pytest.raises(UnreadableError, match="checksum"):
        read(bytes(log))
    # A part that begins no record, and a record inside of another.
    parts = leveldb([b"a" * 100_000], 0)
    with pytest.raises(UnreadableError, match="follow each other"):
        read(parts[32_768:], 0)
    with pytest.raises(UnreadableError, match="follow each other"):
        read(parts[:32_768] + leveldb([b"b"], 0), 0)


def test_a_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "MAX_RECORD", 50_000)
    with pytest.raises(UnreadableError, match="larger than"):
        read(leveldb([b"a" * 60_000], 7))


def test_fields_of_every_kind() -> None:
    data = message({1: 300, 2: b"text", 500: 0}) + b"\x19" + bytes(8) + b"\x25" + bytes(4)
    assert list(fields(data)) == [(1, 300), (2, b"text"), (500, 0), (3, bytes(8)), (4, bytes(4))]
    assert signed(2**64 - 5) == -5 and signed(7) == 7
    assert varint(b"\xac\x02", 0) == (300, 2)


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x08" + b"\xff" * 11, b"\x12\x05abc", b"\x0b", b"\x19\x00", b"\x12" + b"\xff" * 9 + b"\x01"],
)
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableError):
        list(fields(data))


def test_the_number_of_fields_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "MAX_FIELDS", 5)
    with pytest.raises(UnreadableError, match="more than 5 fields"):
        list(fields(b"\x08\x01" * 6))
