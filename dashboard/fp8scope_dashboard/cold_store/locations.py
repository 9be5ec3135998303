"""The location of a body in the cold store."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from typing import Final
from uuid import UUID

DIGEST_BYTES: Final = 32
PACKED: Final = struct.Struct(f">{DIGEST_BYTES}sQQ{DIGEST_BYTES}s")


@dataclass(frozen=True)
class BodyLocation:
    """A body in a file.

    Attributes:
        file: the SHA-256 of the whole file, which is in its name.
        offset, size: the bytes of the body in the file.
        digest: the SHA-256 of the body.
    """

    file: bytes
    offset: int
    size: int
    digest: bytes

    def pack(self) -> bytes:
        """The location in the form of the database."""
        return PACKED.pack(self.file, self.offset, self.size, self.digest)

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> BodyLocation:
        """The inverse of `pack`."""
        return cls(*PACKED.unpack(packed))

    def fits(self, body: bytes | memoryview) -> bool:
        """Return whether these bytes are the body."""
        return len(body) == self.size and sha256(body).digest() == self.digest


def file_name(run_id: UUID, digest: bytes) -> str:
    """The name of a file: all files are in one folder, because some stores make an object of each folder."""
    return f"{run_id}-{digest.hex()}.bodies"
