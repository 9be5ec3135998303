"""Encode neighbouring series losslessly in one body.

pcodec stores a series in the narrowest of int32, int64, float32 and float64 that holds it exactly. A constant
series is stored as one value, and a series without values as nothing. If some rows have no value, the lengths
of the stretches with and without values precede the values. Because each series has about 30 bytes of
overhead, equal series are stored once, and short series are stored together if that is smaller.

    series  = b"" | tag (1 byte) [size of stretches (4 bytes), stretches] values
    values  = float64 if constant, the first value and the difference for evenly spaced integers (steps,
              seqs), else the standalone format of pcodec
    body    = concatenated series, series i from offsets[i] to offsets[i + 1]
            | a single series that all are equal to; offsets is empty
            | 6 (1 byte) how (1 byte) series (2 bytes) rows (4 bytes) [size of stretches (4 bytes), stretches]
              a single series; offsets is empty
    how     = 0: the first `series` series are all equal to it; 1: it is their concatenation; 2: it is their
              concatenation without the rows that lack values, which are the same in all, as in the stretches
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, standalone

from fp8scope_dashboard.telemetry.codec import Float64s

Bools = NDArray[np.bool_]

WIDTH: Final = 128
"""Series in a tile."""

# The default level 8 of pcodec takes ten times as long here and saves one percent.
CONFIG: Final = ChunkConfig(compression_level=4)
CONSTANT, EVENLY, TOGETHER, PLAIN, PARTLY = 0, 5, 6, 7, 0x80
ALIKE, IN_TURN, SIFTED = 0, 1, 2
TOGETHER_HEAD: Final = struct.Struct("<BBHI")
# Up to this many numbers (256 rows of a whole tile), decoding all series takes as long as decoding one.
# Beyond it, mixing different series costs more bytes than their overhead.
MAX_TOGETHER: Final = 32_768
KINDS: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype(np.int32),
    2: np.dtype(np.int64),
    3: np.dtype(np.float32),
    4: np.dtype(np.float64),
}
TAGS: Final = {kind: tag for tag, kind in KINDS.items()}
EXACT_INTEGERS: Final = 2.0**53
OFFSET_BYTES: Final = 4


@dataclass(frozen=True)
class TileSeries:
    """The requested series of one tile.

    Attributes:
        low, high: the first and the last requested position in the tile; all between them are fetched.
        cells: for each requested tensor, its position after `low` and its row in the result.
    """

    low: int
    high: int
    cells: list[tuple[int, int]]


def series_by_tile(tensors: NDArray[np.int64]) -> dict[int, TileSeries]:
    """Group tensors, int64[T] of Tensor.index, by the tile that holds them."""
    rows: dict[int, list[int]] = {}
    for row, tile in enumerate((tensors // WIDTH).tolist()):
        rows.setdefault(tile, []).append(row)
    grouped = {}
    for tile, of_tile in rows.items():
        positions = (tensors[of_tile] % WIDTH).tolist()
        low, high = min(positions), max(positions)
        grouped[tile] = TileSeries(
            low, high, [(position - low, row) for position, row in zip(positions, of_tile, strict=True)]
        )
    return grouped


def encode_tile(series: Sequence[bytes]) -> tuple[list[int], bytes] | None:
    """Join encoded series to (offsets, body); None if none has a value."""
    if not any(series):
        return None
    if all(matrix == series[0] for matrix in series):
        return [], series[0]
    offsets = np.cumsum([0, *map(len, series)])
    return offsets.tolist(), b"".join(series)


def cut_tile(
    offsets: Sequence[int], body: bytes | memoryview, count: int, first: int = 0
) -> list[memoryview]:
    """Return the encoded series first..first + count - 1 of a tile.

    The inverse of `encode_tile` and `encode_matrix`. If offsets are given, they and `body` hold only these
    series.
    """
    view = memoryview(body)
    if len(offsets):
        begin = offsets[0]
        return [view[low - begin : high - begin] for low, high in zip(offsets[:-1], offsets[1:], strict=True)]
    if len(view) and view[0] == TOGETHER:
        return _cut_together(view, count, first)
    return [view] * count


def encode_matrix(values: Float64s, series: int = 0) -> tuple[list[int], bytes] | None:
    """Encode float64[series, rows], where NaN is no value, padded with empty series up to `series`."""
    present: Bools = ~np.isnan(values)
    whole = _encode_together(values, present)
    if whole is not None and whole[1] == ALIKE:
        return [], whole
    encoded = [encode_series(row, there) for row, there in zip(values, present, strict=True)]
    tile = encode_tile(encoded + [b""] * (series - len(encoded)))
    if tile is None or whole is None or len(tile[1]) + OFFSET_BYTES * len(tile[0]) <= len(whole):
        return tile
    return [], whole


def decode_matrix(offsets: Sequence[int], body: bytes | memoryview, out: Float64s) -> None:
    """Decode into float64[series, rows], NaN if there is no value."""
    if not len(offsets) and body[0] != TOGETHER:  # one series for all
        out[:] = decode_series(body, out.shape[1])[0]
        return
    for row, series in zip(out, cut_tile(offsets, body, len(out)), strict=True):
        decode_into(series, row)


def encode_series(values: Float64s, present: Bools | None = None) -> bytes:
    """Encode float64[rows]. Only the rows of `present`, bool[rows], have a value, which may be NaN."""
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
    """Encode int64[rows] without gaps: the steps, times or seqs of a block."""
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
    """The inverse of `encode_series`: float64[rows], NaN if there is no value, and bool[rows], whether so."""
    out = np.empty(rows)
    return out, decode_into(body, out)


def decode_into(body: bytes | memoryview, out: Float64s) -> Bools:
    """As `decode_series`, into an array. Returns which rows have a value."""
    if not len(body):
        out.fill(np.nan)
        return np.zeros(len(out), bool)
    tag, position = body[0], 1
    if tag == PLAIN:
        out[:] = np.frombuffer(body, np.float64, offset=1)
        return ~np.isnan(out)
    if not tag & PARTLY:
        _decode_values(tag, body[position:], out)
        return np.ones(len(out), bool)
    (size,) = struct.unpack_from("<I", body, position)
    position += 4
    present = _decode_stretches(bytes(body[position : position + size]), len(out))
    values = np.empty(np.count_nonzero(present))
    _decode_values(tag & ~PARTLY, body[position + size :], values)
    out.fill(np.nan)
    out[present] = values
    return present


def _encode_together(values: Float64s, present: Bools) -> bytes | None:
    """Encode all series as one; None if there are no values, or too many different ones."""
    some = np.flatnonzero(present.any(axis=1))
    if not len(some):
        return None
    values, present = values[: some[-1] + 1], present[: some[-1] + 1]
    count, rows = values.shape
    if count == 1:
        return None
    same_rows = bool((present == present[0]).all())
    # Compare bits, ignoring rows without a value.
    if same_rows and (values.view(np.int64) == values[0].view(np.int64))[present].all():
        head, series = b"", encode_series(values[0], present[0])
        how = ALIKE
    elif values.size > MAX_TOGETHER:
        return None
    elif same_rows and not present[0].all():
        stretches = _encode_stretches(present[0])
        head, series = struct.pack("<I", len(stretches)) + stretches, encode_series(values[present])
        how = SIFTED
    else:
        head, series = b"", encode_series(values.reshape(-1), present.reshape(-1))
        how = IN_TURN
    return TOGETHER_HEAD.pack(TOGETHER, how, count, rows) + head + series


def _cut_together(view: memoryview, count: int, first: int) -> list[memoryview]:
    """Split the result of `_encode_together` into single series."""
    _, how, stored, rows = TOGETHER_HEAD.unpack_from(view)
    wanted = range(first, first + count)
    rest = view[TOGETHER_HEAD.size :]
    if how == ALIKE:
        return [rest if position < stored else rest[:0] for position in wanted]
    if how == SIFTED:
        (size,) = struct.unpack_from("<I", rest)
        present = _decode_stretches(bytes(rest[4 : 4 + size]), rows)
        matrix = np.full((stored, rows), np.nan)
        count_present = np.count_nonzero(present)
        values, _ = decode_series(rest[4 + size :], stored * count_present)
        matrix[:, present] = values.reshape(stored, count_present)
    else:
        matrix = decode_series(rest, stored * rows)[0].reshape(stored, rows)
    plain = [memoryview(bytes([PLAIN]) + row.tobytes()) for row in matrix[first : first + count]]
    return plain + [view[:0]] * (count - len(plain))


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
    """Convert to the narrowest type that holds every value exactly."""
    low, high = values.min(), values.max()
    # False for NaN.
    if low >= -EXACT_INTEGERS and high <= EXACT_INTEGERS:
        kind = np.int32 if low >= -(2.0**31) and high < 2.0**31 else np.int64
        whole = values.astype(kind)
        # Only floats have a negative zero.
        if (whole == values).all() and not (low <= 0 <= high and np.signbit(values[whole == 0]).any()):
            return whole
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
    same = single.astype(np.float64).view(np.int64) == values.view(np.int64)
    return single if same.all() else values


def _encode_stretches(present: Bools) -> bytes:
    """Lengths of alternating stretches with and without values, beginning with values (possibly 0)."""
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
    ends = np.append(np.cumsum(lengths, dtype=np.int64), rows)
    return np.repeat(np.arange(len(ends)) % 2 == 0, np.diff(ends, prepend=0))
