"""Every message counts once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from django.db import connection
from django.utils import timezone

from fp8scope_dashboard.ingest.models import Receipt
from fp8scope_dashboard.wire.errors import WriterConflictError

MessageKind = Literal["batch", "histogram", "evaluation", "report", "finish"]


@dataclass(frozen=True)
class Message:
    """What identifies a message: (run, writer, seq), and a digest of its bytes."""

    run: UUID
    writer: UUID
    seq: int
    kind: MessageKind
    digest: bytes


def identify(run: UUID, writer: UUID, seq: int, kind: MessageKind, body: bytes) -> Message:
    """Name a message by what was sent, byte for byte."""
    return Message(run, writer, seq, kind, hashlib.sha256(kind.encode() + b"\0" + body).digest())


def enter(message: Message) -> bool:
    """Write the receipt, within the transaction that stores the message. False: it was stored before.

    Of two requests with the same message at the same time one waits here until the other has committed, and
    then is the duplicate; or has failed, and then stores.

    Raises:
        WriterConflictError: another message is stored under this (run, writer, seq).
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO ingest_receipt (run_id, writer, seq, kind, digest, received_at)
            VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
            RETURNING 1
            """,
            [message.run, message.writer, message.seq, message.kind, message.digest, timezone.now()],
        )
        if cursor.fetchone():
            return True
    stored = Receipt.objects.values_list("digest", flat=True).get(
        run_id=message.run, writer=message.writer, seq=message.seq
    )
    if bytes(stored) != message.digest:
        raise WriterConflictError(
            f"Another message is stored under seq {message.seq} of writer {message.writer}.",
            "Another process uses this writer's id: take a new one and send again what was not acknowledged.",
        )
    return False


def arrivals(run_id: UUID) -> dict[UUID, tuple[int, int]]:
    """By writer, how many messages have arrived, and how many before the last of them have not."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT writer, count(*), max(seq) + 1 - count(*)
            FROM ingest_receipt WHERE run_id = %s GROUP BY writer
            """,
            [run_id],
        )
        return {writer: (int(arrived), int(missing)) for writer, arrived, missing in cursor.fetchall()}
