"""Neighbouring series in one body: each series' numbers to bytes and back, without losing a bit.

A series is stored in the narrowest of int32, int64, float32 and float64 that holds it exactly, by pcodec;
one that never changes as that one value, one without any value as nothing at all. Where some rows have no
value, the lengths of the stretches with and without are stored before the values that are there.

    series  = b"" | tag (1 byte) [size of stretches (4 bytes), stretches] values
    values  = float64 when constant, else pcodec's standalone format; of integers that grow evenly (steps,
    seqs) the
              first and the difference
    body    = the series one after the other; offsets[i] to offsets[i + 1] is series i
            | one series that all of them are equal to; offsets is empty
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, standalone

from fp8scope_dashboard.telemetry.codec import Float64s

Bools = NDArray[np.bool_]

WIDTH: Final = 128
"""Series in a tile."""

# Level 8, pcodec's default, takes ten times as long here for one percent fewer bytes.
CONFIG: Final = ChunkConfig(compression_level=4)
CONSTANT, EVENLY, PARTLY = 0, 5, 0x80
KINDS: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype(np.int32),
    2: np.dtype(np.int64),
    3: np.dtype(np.float32),
    4: np.dtype(np.float64),
}
TAGS: Final = {kind: tag for tag, kind in KINDS.items()}
EXACT_INTEGERS: Final = 2.0**53


def tile_of(index: int) -> tuple[int, int]:
    """The tile that a tensor is in, and its place there."""
    return divmod(index, WIDTH)


def encode_tile(series: Sequence[bytes]) -> tuple[list[int], bytes] | None:
    """Join encoded series to (offsets, body); None when none of them has a value."""
    if not any(series):
        return None
    if all(each == series[0] for each in series):
        return [], series[0]
    offsets = np.cumsum([0, *map(len, series)])
    return offsets.tolist(), b"".join(series)


def cut_tile(offsets: Sequence[int], body: bytes | memoryview, count: int) -> list[memoryview]:
    """The encoded series of a tile of `count`, the inverse of `encode_tile`.

    Offsets may be those of some neighbouring series, `body` then holds just these.
    """
    view = memoryview(body)
    if not len(offsets):
        return [view] * count
    begin = offsets[0]
    return [view[low - begin : high - begin] for low, high in zip(offsets[:-1], offsets[1:], strict=True)]


def encode_matrix(values: Float64s, series: int = 0) -> tuple[list[int], bytes] | None:
    """Encode float64[series, rows], NaN being no value; up to `series`, further ones without any value."""
    present: Bools = ~np.isnan(values)
    encoded = [encode_series(row, there) for row, there in zip(values, present, strict=True)]
    return encode_tile(encoded + [b""] * (series - len(encoded)))


def decode_matrix(offsets: Sequence[int], body: bytes | memoryview, out: Float64s) -> None:
    """Decode into float64[series, rows]: NaN where there is no value."""
    if not len(offsets):
        out[:] = decode_series(body, out.shape[1])[0]
        return
    for row, series in zip(out, cut_tile(offsets, body, len(out)), strict=True):
        decode_into(series, row)


def encode_series(values: Float64s, present: Bools | None = None) -> bytes:
    """Encode float64[rows]; only the rows of `present` have a value, which may be NaN."""
    head, tag = b"", 0
    if present is not None and not present.all():
        stretches = _encode_stretches(present)
        head, tag = struct.pack("<I", len(stretches)) + stretches, PARTLY
        values = values[present]
    if not len(values):
        return b""
    values = np.ascontiguousarray(values)
    bits = values.view(np.int64)
    if (bits == bits[0]).all():
        return bytes([tag | CONSTANT]) + head + struct.pack("<d", values[0])
    narrow = _narrow(values)
    return bytes([tag | TAGS[narrow.dtype]]) + head + bytes(standalone.simple_compress(narrow, CONFIG))


def encode_integers(values: NDArray[np.int64]) -> bytes:
    """Encode int64[rows], all of them there: a block's steps, times or seqs."""
    pace = int(values[1] - values[0]) if len(values) > 1 else 0
    if (np.diff(values) == pace).all():
        return bytes([EVENLY]) + struct.pack("<qq", values[0], pace)
    return bytes([TAGS[values.dtype]]) + bytes(standalone.simple_compress(values, CONFIG))


def decode_integers(body: bytes | memoryview, rows: int) -> NDArray[np.int64]:
    """The inverse of `encode_integers`."""
    if body[0] == EVENLY:
        first, pace = struct.unpack_from("<qq", body, 1)
        return np.arange(rows, dtype=np.int64) * np.int64(pace) + np.int64(first)
    out = np.empty(rows, np.int64)
    standalone.simple_decompress_into(bytes(body[1:]), out)
    return out


def decode_series(body: bytes | memoryview, rows: int) -> tuple[Float64s, Bools]:
    """The inverse of `encode_series`: float64[rows], NaN where there is no value, and where there is one."""
    out = np.empty(rows)
    return out, decode_into(body, out)


def decode_into(body: bytes | memoryview, out: Float64s) -> Bools:
    """`decode_series` into an array. Returns which rows have a value."""
    if not len(body):
        out.fill(np.nan)
        return np.zeros(len(out), bool)
    tag, place = body[0], 1
    if not tag & PARTLY:
        _decode_values(tag, body[place:], out)
        return np.ones(len(out), bool)
    (size,) = struct.unpack_from("<I", body, place)
    place += 4
    present = _decode_stretches(bytes(body[place : place + size]), len(out))
    values = np.empty(np.count_nonzero(present))
    _decode_values(tag & ~PARTLY, body[place + size :], values)
    out.fill(np.nan)
    out[present] = values
    return present


def _decode_values(tag: int, body: bytes | memoryview, out: Float64s) -> None:
    if tag == CONSTANT:
        out.fill(struct.unpack("<d", body)[0])
        return
    kind = KINDS[tag]
    whole = out if kind == out.dtype and out.flags.c_contiguous else np.empty(len(out), kind)
    standalone.simple_decompress_into(bytes(body), whole)
    if whole is not out:
        out[:] = whole


def _narrow(values: Float64s) -> NDArray[Any]:
    """The same numbers in the narrowest type that holds each of them exactly."""
    low, high = values.min(), values.max()
    # False for NaN.
    if low >= -EXACT_INTEGERS and high <= EXACT_INTEGERS:
        kind = np.int32 if low >= -(2.0**31) and high < 2.0**31 else np.int64
        whole = values.astype(kind)
        # A negative zero is a float only.
        if (whole == values).all() and not (low <= 0 <= high and np.signbit(values[whole == 0]).any()):
            return whole
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
    same = single.astype(np.float64).view(np.int64) == values.view(np.int64)
    return single if same.all() else values


def _encode_stretches(present: Bools) -> bytes:
    """Lengths of the stretches by turns with and without a value, the first with (perhaps of length 0)."""
    edges = np.flatnonzero(np.diff(present.astype(np.int8), prepend=1)).astype(np.int64)
    lengths = np.diff(np.concatenate([[0], edges])).astype(np.uint32)
    if len(lengths) <= 4:
        return b"\0" + lengths.tobytes()
    return b"\1" + bytes(standalone.simple_compress(lengths, CONFIG))


def _decode_stretches(body: bytes, rows: int) -> Bools:
    if body[:1] == b"\0":
        lengths = np.frombuffer(body[1:], np.uint32)
    else:
        lengths = np.asarray(standalone.simple_decompress(body[1:]), np.uint32)
    present = np.zeros(rows, bool)
    begin = 0
    edges = np.append(np.cumsum(lengths, dtype=np.int64), rows)
    for place, end in enumerate(edges.tolist()):
        if place % 2 == 0:
            present[begin:end] = True
        begin = end
    return present
