"""The reader of protobuf's wire format, beside the package protobuf, and on bytes that are none."""

from __future__ import annotations

import pytest
from agent.helpers.event_files import scalars
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.tensor_pb2 import TensorProto

from fp8scope.binary.protobuf import (
    BYTES,
    FIXED64,
    VARINT,
    ProtobufError,
    double,
    fields,
    fixed32,
    fixed64,
    signed,
    single,
    text,
    varint,
    varints,
)


def test_it_works() -> None:
    data = scalars(-7, 2.5, loss=1.5).SerializeToString()
    read = {number: (kind, at, end) for number, kind, at, end in fields(data)}
    assert read[1][0] == FIXED64 and double(data, read[1][1]) == 2.5
    assert read[2][0] == VARINT and signed(read[2][1]) == -7
    _, at, end = read[5]
    ((number, kind, first, last),) = fields(data, at, end)
    assert (number, kind) == (1, BYTES)
    inner = {number: (at, end) for number, _, at, end in fields(data, first, last)}
    assert text(data, *inner[1]) == "loss" and single(data, inner[2][0]) == 1.5


@given(st.integers(0, 2**64 - 1))
def test_integers_of_every_size(value: int) -> None:
    data, rest = bytearray(), value
    while rest > 127:
        data.append(rest & 127 | 128)
        rest >>= 7
    data.append(rest)
    assert varint(bytes(data), 0, len(data)) == (value, len(data))
    assert signed(value) == (value - 2**64 if value >= 2**63 else value)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_packed_integers(values: list[int]) -> None:
    data = TensorProto(int64_val=values).SerializeToString()
    read = [(at, end) for number, _, at, end in fields(data) if number == 10]
    assert [signed(value) for at, end in read for value in varints(data, at, end)] == values


def test_numbers_of_fixed_size() -> None:
    data = bytes(range(12))
    assert fixed32(data, 1) == 0x04030201 and fixed64(data, 2) == 0x0908070605040302


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80" * 11, "does not end"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "does not end"),
        (b"\x0a\x05abc", "longer than its message"),
        (b"\x09abc", "longer than its message"),
        (b"\x00\x01", "no field 0"),
        (b"\x0e", "unknown type 6"),
        (b"\x0c", "unknown type 4"),
        (b"\x0b\x14", "has not begun"),
        (b"\x0b" * 40, "too deeply"),
        (b"\x0b\x12\x7f", "longer than its message"),
    ],
)
def test_bytes_that_are_no_message(data: bytes, message: str) -> None:
    with pytest.raises(ProtobufError, match=message):
        list(fields(data))


def test_groups_are_left_out() -> None:
    data = b"\x0b\x13\x08\x01\x14\x12\x02hi\x15abcd\x19abcdefgh\x0c\x10\x05"
    assert list(fields(data)) == [(2, VARINT, 5, 0)]


@given(st.binary(max_size=200))
def test_any_bytes_give_fields_or_an_error(data: bytes) -> None:
    try:
        for _, kind, at, end in fields(data):
            assert kind in (0, 1, 2, 5) and (kind == VARINT or 0 <= at <= end <= len(data))
    except ProtobufError:
        pass


@given(st.binary(max_size=60), st.integers(0, 59))
def test_what_protobuf_reads_is_read(noise: bytes, cut: int) -> None:
    """Messages that the package protobuf accepts, after some bytes of an event were replaced."""
    data = bytearray(scalars(3, 2.5, loss=1.5, accuracy=0.5).SerializeToString())
    data[cut : cut + len(noise)] = noise
    try:
        event = Event.FromString(bytes(data))
    except Exception:  # protobuf's DecodeError has no stable place
        return
    steps = [signed(at) for number, kind, at, _ in fields(bytes(data)) if (number, kind) == (2, VARINT)]
    assert event.step == (steps[-1] if steps else 0)
