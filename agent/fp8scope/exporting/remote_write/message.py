"""Messages of Prometheus' remote write 1.0: a protocol buffer in snappy's block format."""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from fp8scope.binary.encoding import field_bytes, field_double, field_number, field_text, varint
from fp8scope.exporting.remote_write.samples import Labels, MetricSample

HEADERS: Final = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": "fp8scope-remote-write",
}
(STALE,) = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))
"""The NaN that ends a series."""
MAX_LITERAL: Final = 1 << 16


def write_request(samples: Sequence[MetricSample], stale: Iterable[Labels], milliseconds: int) -> bytes:
    """A WriteRequest with a sample for each series, and one that ends each stale one."""
    parts = [_series(sample.labels, sample.value, milliseconds) for sample in samples]
    parts += [_series(labels, STALE, milliseconds) for labels in stale]
    return b"".join(parts)


def _series(labels: Labels, value: float, milliseconds: int) -> bytes:
    named = (field_bytes(1, field_text(1, name) + field_text(2, text)) for name, text in labels)
    sample = field_double(1, value) + field_number(2, milliseconds)
    return field_bytes(1, b"".join(named) + field_bytes(2, sample))


def snappy_block(content: bytes) -> bytes:
    """Content in snappy's block format, as literals: it is valid and not smaller.

    A message of some hundred series has some ten kilobytes: a C library is not worth its installation.
    """
    parts = [varint(len(content))]
    for begin in range(0, len(content), MAX_LITERAL):
        literal = content[begin : begin + MAX_LITERAL]
        # The tag of a literal whose length - 1 follows in two bytes.
        parts += [b"\xf4", struct.pack("<H", len(literal) - 1), literal]
    return b"".join(parts)
