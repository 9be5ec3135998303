"""The declared sizes of a stream are checked before anything is decompressed."""

from __future__ import annotations

import math
import resource
import struct
import uuid
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from contract.helpers.wire_client import arrow_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.ingest.arrow_preflight import open_envelope
from fp8scope_dashboard.ingest.batch import read_arrow
from fp8scope_dashboard.telemetry.codec import decode, extended
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import MalformedError, NotArrowError, RefusalError, TooLargeError

RUN, WRITER = uuid.uuid4(), uuid.uuid4()
ROWS = 1000
Compression = Literal["zstd", "lz4"] | None
# step, time, loss and its validity, amax: its values and their validity.
CLAIMED = ROWS * (8 + 8 + 8 + 2 * 8) + ROWS // 8 + 2 * ROWS // 8


def batch(compression: Compression = "zstd", record_batches: int = 1) -> bytes:
    return arrow_batch(
        RUN,
        WRITER,
        0,
        range(ROWS),
        scalars={"loss": [None, *range(1, ROWS)]},
        tensors={"amax": [[None, 1.0], *[[2.0, 3.0]] * (ROWS - 1)]},
        compression=compression,
        record_batches=record_batches,
    )


def claims(body: bytes, size: int) -> list[int]:
    """The positions where a compressed buffer declares a decompressed size of `size` bytes."""
    return [i for i in range(0, len(body) - 8, 8) if struct.unpack_from("<q", body, i)[0] == size]


def with_claim(size: int) -> bytes:
    """A batch with one buffer that declares a decompressed size of `size` bytes."""
    body = bytearray(batch())
    (position,) = claims(bytes(body), ROWS * 2 * 8)
    struct.pack_into("<q", body, position, size)
    return bytes(body)


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_it_works(compression: Compression) -> None:
    envelope = open_envelope(batch(compression))
    assert envelope.rows == ROWS
    assert len(envelope.batches) == 1
    # Buffers that are not compressed are padded to multiples of 8 or 64.
    assert CLAIMED <= envelope.decompressed_bytes <= CLAIMED + 8 * 64
    assert envelope.schema.names == ["step", "time", "scalar:loss", "tensor:amax"]


def test_record_batches_are_added_up() -> None:
    envelope = open_envelope(batch(record_batches=10))
    assert (len(envelope.batches), envelope.rows) == (10, ROWS)
    assert ROWS * 40 <= envelope.decompressed_bytes <= CLAIMED


@pytest.mark.parametrize("record_batches", [1, 3])
def test_scalars_are_read_from_the_head(record_batches: int) -> None:
    rows, tensors = 30, 400
    amax = np.random.default_rng(0).random((rows, tensors)).tolist()
    losses = [None, math.nan, *range(2, rows)]
    body = arrow_batch(
        RUN, WRITER, 0, range(rows), scalars={"loss": losses}, tensors={"amax": amax},
        record_batches=record_batches,
    )  # fmt: skip
    head = open_envelope(body).head
    if record_batches > 1:
        assert head is None, "the scalars of the last follow the tensors of the others"
        return
    assert head is not None and head < len(body) // 20
    whole, part = (decode(read, statistics=()) for read in (body, extended(body[:head], len(body))))
    np.testing.assert_array_equal(part.scalars["loss"], whole.scalars["loss"])
    np.testing.assert_array_equal(part.logged["loss"], whole.logged["loss"])
    assert (part.steps == whole.steps).all() and (part.times == whole.times).all()
    with pytest.raises((pa.ArrowInvalid, OSError)):
        decode(extended(body[: head - 16], len(body)), statistics=())


def test_a_short_batch_or_one_without_tensors_is_all_head() -> None:
    losses = np.random.default_rng(0).random(5_000).tolist()
    assert open_envelope(arrow_batch(RUN, WRITER, 0, range(5_000), scalars={"loss": losses})).head is None
    assert open_envelope(batch()).head is None


@pytest.mark.parametrize("size", [limits.DECOMPRESSED_BYTES, 10 * 2**30, 2**62, 2**63 - 1])
def test_rejects_a_declared_decompression_bomb(size: int) -> None:
    """A few kilobytes that declare gigabytes are refused without allocating them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLargeError):
        read_arrow(with_claim(size))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_rejects_a_real_decompression_bomb() -> None:
    """Zeros that compress to less than a mebibyte exceed the limit when decompressed."""
    count = limits.DECOMPRESSED_BYTES // (8 * limits.ROWS) + 1
    zeros = pa.array([0.0] * limits.ROWS)
    columns = {f"scalar:s{i}": zeros for i in range(count)}
    body = arrow_batch(RUN, WRITER, 0, range(limits.ROWS), columns=columns)
    assert len(body) < limits.MIB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLargeError):
        open_envelope(body)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize("size", [-2, -(2**63)])
def test_rejects_a_negative_size(size: int) -> None:
    with pytest.raises(MalformedError):
        read_arrow(with_claim(size))


@pytest.mark.parametrize("size", [0, 1, 8, 15_999, 16_001, 1_000_000])
def test_rejects_a_wrong_size_within_the_limits(size: int) -> None:
    with pytest.raises(MalformedError):
        read_arrow(with_claim(size))


def test_rejects_too_many_record_batches() -> None:
    body = arrow_batch(
        RUN, WRITER, 0, range(limits.RECORD_BATCHES + 1), record_batches=limits.RECORD_BATCHES + 1
    )
    with pytest.raises(TooLargeError):
        open_envelope(body)


def test_rejects_a_huge_schema() -> None:
    body = arrow_batch(RUN, WRITER, 0, [1], metadata={"note": "x" * limits.SCHEMA_BYTES})
    with pytest.raises(TooLargeError):
        open_envelope(body)


def test_rejects_an_arrow_file() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("step", pa.int64())])):
        pass
    with pytest.raises(NotArrowError):
        open_envelope(sink.getvalue().to_pybytes())


def test_rejects_bytes_after_the_end_of_stream() -> None:
    """Rows after an early end of stream would be acknowledged and lost."""
    body = batch(record_batches=2)
    schema_and_first = open_envelope(body)
    first = schema_and_first.batches[0]
    assert first.body is not None
    end = body.index(bytes(first.metadata)) + first.metadata.size + first.body.size
    early = body[:end] + b"\xff\xff\xff\xff\0\0\0\0" + body[end:]
    with pytest.raises(MalformedError, match="bytes follow the end"):
        open_envelope(early)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(["zstd", "lz4", None]))
def test_corrupted_bytes_give_a_batch_or_a_refusal(data: st.DataObject, compression: Compression) -> None:
    """Corruption never causes another exception or a crash."""
    body = bytearray(batch(compression))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(body) - 1))
        change = data.draw(st.binary(min_size=1, max_size=9))
        body[start : start + len(change)] = change
    try:
        parsed = read_arrow(bytes(body))
    except RefusalError as refusal:
        assert refusal.message
        assert refusal.hint
    else:
        assert 0 < parsed.rows <= limits.ROWS
        assert parsed.points >= 0


@given(st.integers(0, 3000))
def test_rejects_a_truncated_batch(length: int) -> None:
    body = batch()
    if length < len(body):
        with pytest.raises(RefusalError):
            read_arrow(body[:length])
