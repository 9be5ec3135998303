"""The cursor: how far a spool has been sent.

It is a small file of fixed size that is updated in place, so that it can be written on a full disk. It has
two slots, written in turn; the valid slot with the higher generation wins. A torn write loses one update, but
never the file.
"""

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_SLOT_BYTES = 4096
_HEAD = struct.Struct("<II")


@dataclass(kw_only=True)
class SendProgress:
    """The state that a sender must remember. Positions are positions in the spool.

    `seq` is the number of the next message. The server has finally answered everything before `position`. If
    `sealed_end` is not 0, message `seq` consists of the records from `position` up to there. It may have been
    sent, and must be sent again unchanged; `sealed_digest` is the SHA-256 of its body.
    """

    writer: str
    seq: int = 0
    position: int = 0
    sealed_end: int = 0
    sealed_digest: str = ""
    rows_sent: int = 0
    points_sent: int = 0
    messages_refused: int = 0
    alerts_after: int = 0
    commands_after: int = 0
    finished: bool = False


class Cursor:
    """The `SendProgress` of one spool, kept in `path` (None: in memory only)."""

    def __init__(self, path: Path | None, progress: SendProgress) -> None:
        self.progress = progress
        self._generation = 0
        self._descriptor = -1
        if path is not None:
            # Allocate the blocks now, so that later updates need no disk space.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._descriptor).st_size < 2 * _SLOT_BYTES:
                os.pwrite(self._descriptor, bytes(2 * _SLOT_BYTES), 0)
                self.save()
            else:
                self._load()

    def save(self, *, durable: bool = False) -> None:
        """Write the progress; with `durable`, fsync it."""
        self._generation += 1
        if self._descriptor < 0:
            return
        body = json.dumps({"generation": self._generation, **asdict(self.progress)}).encode()
        slot = _HEAD.pack(zlib.crc32(body), len(body)) + body
        os.pwrite(self._descriptor, slot, (self._generation % 2) * _SLOT_BYTES)
        if durable:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _load(self) -> None:
        names = {field.name for field in fields(SendProgress)}
        for index in range(2):
            raw = os.pread(self._descriptor, _SLOT_BYTES, index * _SLOT_BYTES)
            checksum, length = _HEAD.unpack_from(raw)
            body = raw[_HEAD.size : _HEAD.size + length]
            if not length or len(body) != length or zlib.crc32(body) != checksum:
                continue
            values = json.loads(body)
            if values["generation"] > self._generation:
                self._generation = values["generation"]
                self.progress = SendProgress(**{k: v for k, v in values.items() if k in names})
