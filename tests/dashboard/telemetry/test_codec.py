"""Chunks are encoded and decoded without loss."""

from __future__ import annotations

import uuid
from typing import Literal

import hypothesis.extra.numpy as numpy_strategies
import numpy as np
import pyarrow as pa
import pytest
from contract.helpers.wire_client import TIME, arrow_batch
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.telemetry.codec import ChunkData, decode, encode

floats = st.floats(width=64)


def assert_same(first: ChunkData, second: ChunkData) -> None:
    np.testing.assert_array_equal(first.steps, second.steps)
    np.testing.assert_array_equal(first.times, second.times)
    assert first.scalars.keys() == second.scalars.keys()
    for name in first.scalars:
        np.testing.assert_array_equal(first.logged[name], second.logged[name])
        mask = first.logged[name]
        np.testing.assert_array_equal(first.scalars[name][mask], second.scalars[name][mask])
    assert first.statistics.keys() == second.statistics.keys()
    for name in first.statistics:
        np.testing.assert_array_equal(first.statistics[name], second.statistics[name])
    assert (first.seqs is None) == (second.seqs is None)
    if first.seqs is not None and second.seqs is not None:
        np.testing.assert_array_equal(first.seqs, second.seqs)


@st.composite
def chunk_data(draw: st.DrawFn) -> ChunkData:
    rows = draw(st.integers(1, 12))
    names = draw(st.lists(st.sampled_from(["loss", "tokens", "a/b.c-d"]), unique=True))
    statistics = draw(st.lists(st.sampled_from(["amax", "scale", "numel"]), unique=True))
    masks = {n: draw(numpy_strategies.arrays(bool, rows)) for n in names}
    return ChunkData(
        steps=np.sort(draw(numpy_strategies.arrays(np.int64, rows, elements=st.integers(0, 2**62)))),
        times=TIME + np.arange(rows).astype("datetime64[us]"),
        scalars={n: draw(numpy_strategies.arrays(np.float64, rows, elements=floats)) for n in names},
        logged=masks,
        statistics={
            n: draw(numpy_strategies.arrays(np.float64, (rows, draw(st.integers(0, 5))), elements=floats))
            for n in statistics
        },
        seqs=draw(st.none() | numpy_strategies.arrays(np.int64, rows, elements=st.integers(0, 99))),
    )


def test_it_works() -> None:
    data = ChunkData(
        steps=np.array([3, 4]),
        times=np.array(["2026-01-01T00:00:00.000001", "2026-01-01T00:00:01"], "datetime64[us]"),
        scalars={"loss": np.array([np.nan, 2.0])},
        logged={"loss": np.array([True, False])},
        statistics={"amax": np.array([[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]])},
    )
    back = decode(encode(data))
    assert_same(data, back)
    assert np.isnan(back.scalars["loss"]).all()
    assert back.logged["loss"].tolist() == [True, False]


@given(chunk_data())
def test_decode_inverts_encode(data: ChunkData) -> None:
    assert_same(data, decode(encode(data)))


@given(chunk_data(), st.data())
def test_decoding_some_columns_gives_the_same_values(data: ChunkData, choices: st.DataObject) -> None:
    scalars = choices.draw(st.sets(st.sampled_from(["loss", "tokens", "unknown"])))
    statistics = choices.draw(st.sets(st.sampled_from(["amax", "scale", "unknown"])))
    some = decode(encode(data), scalars=scalars, statistics=statistics)
    assert some.scalars.keys() == data.scalars.keys() & scalars
    assert some.statistics.keys() == data.statistics.keys() & statistics
    for name in some.statistics:
        np.testing.assert_array_equal(some.statistics[name], data.statistics[name])


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("record_batches", [1, 3])
def test_decodes_batches_of_other_arrow_writers(
    compression: Literal["zstd", "lz4"] | None, record_batches: int
) -> None:
    lists = pa.array([[1.5, None], [2.5, 3.5], [None, None]], pa.list_(pa.float32(), 2))
    body = arrow_batch(
        uuid.uuid4(),
        uuid.uuid4(),
        0,
        [1, 2, 2],
        scalars={"loss": [None, 1.0, float("nan")]},
        columns={"tensor:amax": lists},
        compression=compression,
        record_batches=record_batches,
    )
    data = decode(body)
    assert data.steps.tolist() == [1, 2, 2]
    assert data.times[0] == np.datetime64(TIME, "us")
    assert data.logged["loss"].tolist() == [False, True, True]
    np.testing.assert_array_equal(data.scalars["loss"], [np.nan, 1.0, np.nan])
    assert data.statistics["amax"].dtype == np.float64
    np.testing.assert_array_equal(data.statistics["amax"], [[1.5, np.nan], [2.5, 3.5], [np.nan, np.nan]])


def test_does_not_decompress_omitted_columns() -> None:
    """Decoding other columns succeeds although the bytes of this column are invalid."""
    noise = np.random.default_rng(0).random((64, 50))
    data = ChunkData(
        steps=np.arange(64),
        times=(TIME + np.arange(64)).astype("datetime64[us]"),
        scalars={"loss": np.arange(64.0)},
        logged={"loss": np.ones(64, bool)},
        statistics={"amax": noise},
    )
    body = bytearray(encode(data))
    start = len(body) - 2000
    body[start : start + 500] = b"\0" * 500
    with pytest.raises(OSError, match=r"(?i)zstd|decompress"):
        decode(bytes(body))
    assert decode(bytes(body), scalars=["loss"], statistics=[]).scalars["loss"].tolist() == list(range(64))


def test_selects_rows_by_slice_mask_and_index() -> None:
    data = ChunkData(
        steps=np.arange(4),
        times=np.arange(4).astype("datetime64[us]"),
        statistics={"amax": np.eye(4)},
        seqs=np.arange(4),
    )
    for chosen in (slice(1, 3), np.array([False, True, True, False]), np.array([1, 2])):
        some = data.rows(chosen)
        assert (len(some), some.steps.tolist()) == (2, [1, 2])
        assert some.seqs is not None
        assert some.seqs.tolist() == [1, 2]
        np.testing.assert_array_equal(some.statistics["amax"], np.eye(4)[1:3])
