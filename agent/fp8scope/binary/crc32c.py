"""The checksum of TFRecord files: CRC-32C, of many short records or of a long one, by NumPy.

A checksum is linear over GF(2). So the bytes at the same position of many records are processed together, and
a long record is cut into lanes of LANE bytes, which are joined by what LANE zero bytes do to a checksum.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's, reflected (RFC 3720, appendix B.4)."""
LANE: Final = 256
LONG: Final = 1024
"""Records of more bytes are cut into lanes."""
MASK: Final = 0xA282EAD8

Uint32s = NDArray[np.uint32]


def _byte_table() -> Uint32s:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE: Final = _byte_table()


def _zeros(state: Uint32s, count: int) -> Uint32s:
    """States after `count` zero bytes."""
    for _ in range(count):
        state = _TABLE[state & 0xFF] ^ (state >> 8)
    return state


# What LANE zero bytes do to each of the four bytes of a state.
_ADVANCE: Final = [
    _zeros(np.arange(256, dtype=np.uint32) << np.uint32(8 * byte), LANE).tolist() for byte in range(4)
]


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`."""
    values = np.frombuffer(data, np.uint8)
    if len(values) > LONG:
        return _long(values)
    return int(_many(values, np.zeros(1, np.int64), np.array([len(values)]))[0])


def masked_crcs(buffer: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Uint32s:
    """Return the masked CRC-32C, as in TFRecord files, of the pieces of a buffer.

    Args:
        buffer: uint8[B].
        starts, lengths: int64[N], within the buffer.
    """
    crcs = np.zeros(len(starts), np.uint32)
    is_long = lengths > LONG
    short = np.flatnonzero(~is_long)
    crcs[short] = _many(buffer, starts[short], lengths[short])
    for index in np.flatnonzero(is_long).tolist():
        crcs[index] = _long(buffer[starts[index] : starts[index] + lengths[index]])
    # Rotated, because a checksum of data that has its own checksum in it would be weak.
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(MASK)


def _many(buffer: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Uint32s:
    if not len(starts):
        return np.zeros(0, np.uint32)
    order = np.argsort(-lengths, kind="stable")
    at, states = starts[order], np.full(len(order), 0xFFFFFFFF, np.uint32)
    # Position by position, of the records that are long enough.
    reaching = np.searchsorted(-lengths[order], -np.arange(int(lengths.max())), side="left")
    for position, count in enumerate(reaching.tolist()):
        state = states[:count]
        states[:count] = _TABLE[(state ^ buffer[at[:count] + position]) & 0xFF] ^ (state >> 8)
    crcs = np.empty(len(order), np.uint32)
    crcs[order] = ~states
    return crcs


def _long(values: NDArray[np.uint8]) -> int:
    lanes = -(-len(values) // LANE)
    # Zeros before the data change nothing of a state of zero. The first state, all ones, goes into the data.
    padded = np.zeros(lanes * LANE, np.uint8)
    first = len(padded) - len(values)
    padded[first:] = values
    padded[first : first + 4] ^= 0xFF
    matrix = padded.reshape(lanes, LANE)
    states = np.zeros(lanes, np.uint32)
    for position in range(LANE):
        states = _TABLE[(states ^ matrix[:, position]) & 0xFF] ^ (states >> 8)
    a, b, c, d = _ADVANCE
    state = 0
    for lane in states.tolist():
        state = a[state & 255] ^ b[state >> 8 & 255] ^ c[state >> 16 & 255] ^ d[state >> 24] ^ lane
    return int(state ^ 0xFFFFFFFF)
