"""Tiles are encoded losslessly, in every format, and any selection of series can be decoded."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as numpy_strategies
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.telemetry import tile_codec
from fp8scope_dashboard.telemetry.codec import Float64s
from fp8scope_dashboard.telemetry.tile_codec import (
    WIDTH,
    cut_tile,
    decode_into,
    decode_matrix,
    encode_matrix,
    encode_series,
    encode_tile,
)

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -3.0, math.inf, -math.inf, 2.0**60, 1e-320, 0.1])
SIDE_BY_SIDE = (
    "0470636f2103008201040106050000001000f8ffffffffffefff0102010000000000fa7f000000000000000036580066"
    "2deb53be9b9999999999bb7f0100000000001680000000000000024000801b0000000170636f21030042010401010400"
    "000010000000000010006401000000000000001c400170636f2103008201040103050000001000400000000c002a00"
)
VALUES = st.floats(allow_nan=False) | SPECIAL | st.integers(-(2**40), 2**40).map(float)


@st.composite
def matrices(draw: st.DrawFn) -> Float64s:
    """Series like those of statistics: dense, sampled, with gaps, equal, constant, empty."""
    series, rows = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    few = draw(numpy_strategies.arrays(np.float64, draw(st.integers(1, 8)), elements=VALUES))
    values = rng.choice(few, (series, rows))
    if draw(st.booleans()):
        values[:] = values[0]
    if draw(st.booleans()):
        values[:] = values[:, :1]
    absent = draw(st.sampled_from(["none", "sampled", "partly", "rows"]))
    if absent == "sampled":
        values[:, np.arange(rows) % 10 != draw(st.integers(0, 9))] = math.nan
    elif absent == "partly":
        values[rng.random((series, rows)) < 0.5] = math.nan
    elif absent == "rows":
        values[rng.random(series) < 0.5] = math.nan
    return values


def as_fetched(offsets: list[int], body: bytes, low: int, high: int) -> tuple[list[int], bytes]:
    """The part of a tile that the SQL of the readers returns for the series low..high."""
    if not offsets:
        return offsets, body
    cut = offsets[low : high + 2]
    return cut, body[cut[0] : cut[-1]]


def assert_same_bits(actual: Float64s, expected: Float64s) -> None:
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(~np.isnan(actual), known)
    np.testing.assert_array_equal(actual[known].view(np.int64), expected[known].view(np.int64))


def test_it_works() -> None:
    values = np.array([[1.0, 2.0, math.nan], [math.nan] * 3, [4.0, 4.0, 4.0]])
    encoded = encode_matrix(values, WIDTH)
    assert encoded is not None
    out = np.empty((WIDTH, 3))
    decode_matrix(*encoded, out)
    assert_same_bits(out[:3], values)
    assert np.isnan(out[3:]).all()
    assert encode_matrix(np.full((3, 5), math.nan), WIDTH) is None


@given(matrices(), st.data(), st.booleans())
def test_decodes_any_selection_of_series(values: Float64s, data: st.DataObject, together: bool) -> None:
    most, tile_codec.MAX_TOGETHER = tile_codec.MAX_TOGETHER, tile_codec.MAX_TOGETHER if together else 0  # type: ignore[misc]
    try:
        encoded = encode_matrix(values, WIDTH)
    finally:
        tile_codec.MAX_TOGETHER = most  # type: ignore[misc]
    if encoded is None:
        assert np.isnan(values).all()
        return
    low = data.draw(st.integers(0, len(values) + 1))
    high = data.draw(st.integers(low, len(values) + 2))
    out = np.empty(values.shape[1])
    pieces = cut_tile(*as_fetched(*encoded, low, high), high - low + 1, low)
    assert len(pieces) == high - low + 1
    for index, piece in enumerate(pieces, low):
        present = decode_into(piece, out)
        expected = values[index] if index < len(values) else np.full(len(out), math.nan)
        assert_same_bits(out, expected)
        np.testing.assert_array_equal(present, ~np.isnan(expected))
    whole = np.empty((WIDTH, values.shape[1]))
    decode_matrix(*encoded, whole)
    assert_same_bits(whole[: len(values)], values)
    assert np.isnan(whole[len(values) :]).all()


@given(matrices())
def test_reads_separately_stored_series(values: Float64s) -> None:
    """Earlier versions stored every series separately."""
    encoded = encode_tile([encode_series(row, ~np.isnan(row)) for row in values])
    if encoded is not None:
        out = np.empty(values.shape)
        decode_matrix(*encoded, out)
        assert_same_bits(out, values)


def test_reads_bytes_of_earlier_versions() -> None:
    """Tiles of earlier versions: separately stored series, and one constant for all series."""
    side_by_side = bytes.fromhex(SIDE_BY_SIDE)
    decoded = np.empty((4, 6))
    decode_matrix([0, 77, 117, 117, 143], side_by_side, decoded)
    nan = math.nan
    expected = [
        [1.5, -2.25, 3e300, 0.1, 5.0, -0.0],
        [nan, 7, 7, nan, 7, nan],
        [nan] * 6,
        [8.0, 9, 8, 9, 8, 9],
    ]
    assert_same_bits(decoded, np.array(expected))
    decode_matrix([], b"\0" + np.float64(8.0).tobytes(), decoded)
    assert (decoded == 8.0).all()


def test_stores_equal_series_once() -> None:
    rng = np.random.default_rng(0)
    row = rng.random(5000)
    row[rng.random(5000) < 0.9] = math.nan
    encoded = encode_matrix(np.repeat(row[None], 100, axis=0), WIDTH)
    assert encoded is not None and encoded[0] == []
    assert len(encoded[1]) < len(encode_series(row, ~np.isnan(row))) + 20


@pytest.mark.parametrize("rows", [5, 40, 200])
def test_short_series_share_their_overhead(rows: int) -> None:
    """Separately stored short series would consist mostly of headers."""
    values = np.random.default_rng(1).integers(0, 9, (108, rows)).astype(float)
    encoded = encode_matrix(values, WIDTH)
    separate = encode_tile([encode_series(row) for row in values])
    assert encoded is not None and separate is not None
    assert 20 * 108 + len(encoded[1]) < len(separate[1])


def test_reads_one_long_series_without_the_others() -> None:
    values = np.random.default_rng(2).random((WIDTH, 300))
    encoded = encode_matrix(values, WIDTH)
    assert encoded is not None
    offsets, body = as_fetched(*encoded, 7, 7)
    assert len(body) < len(encoded[1]) / 100
    out = np.empty(300)
    decode_into(cut_tile(offsets, body, 1, 7)[0], out)
    assert_same_bits(out, values[7])
