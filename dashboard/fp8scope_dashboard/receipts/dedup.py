"""Recognise messages that are already stored, so that a retry changes nothing."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Final, Literal
from uuid import UUID

from django.db import connection

from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.wire.errors import WriterConflictError

MessageKind = Literal["batch", "histogram", "evaluation", "report", "finish", "media"]


@dataclass(frozen=True)
class MessageId:
    """Identifies a message by (run, writer, seq), its kind and a digest of its bytes."""

    run: UUID
    writer: UUID
    seq: int
    kind: MessageKind
    digest: bytes


# Returns no row if there is a receipt already. Batches have theirs from fp8scope_store_batch (ingest).
_INSERT: Final = """
    INSERT INTO ingest_receipt (run_id, writer, seq, kind, digest, received_at)
    VALUES (%(run)s, %(writer)s, %(seq)s, %(kind)s, %(digest)s, clock_timestamp())
    ON CONFLICT DO NOTHING RETURNING true
"""

_LOCK: Final = """
    SELECT digest FROM ingest_receipt
    WHERE run_id = %(run)s AND writer = %(writer)s AND seq = %(seq)s FOR KEY SHARE
"""


def identify(run: UUID, writer: UUID, seq: int, kind: MessageKind, body: bytes) -> MessageId:
    """Return the id of a message with this body."""
    return MessageId(run, writer, seq, kind, hashlib.sha256(kind.encode() + b"\0" + body).digest())


def record(message: MessageId) -> bool:
    """Write the receipt of a message. Returns False if the message is already stored.

    Call it in the transaction that stores the message. If two transactions record the same message, the
    second waits until the first ends: it returns False if the first commits, and stores the message if the
    first rolls back.

    Raises:
        WriterConflictError: another message is stored under this (run, writer, seq).
    """
    if sql.fetch(_INSERT, asdict(message), replica.PRIMARY):
        return True
    check_same(message)
    return False


def check_same(message: MessageId) -> None:
    """Check that a message is the one that is stored under its id, and that it stays stored.

    A transaction that wrote the receipt and was cut off while it waited for a synchronous standby is
    committed on the primary alone. One that only reads does not wait for the standby. The lock on the row is
    written to the log, so that this transaction does, and a failover cannot lose what is acknowledged here.

    Raises:
        WriterConflictError: it is another one.
        Receipt.DoesNotExist: none is stored.
    """
    parameters = {"run": message.run, "writer": message.writer, "seq": message.seq}
    rows = sql.fetch(_LOCK, parameters, replica.PRIMARY)
    if not rows:
        raise Receipt.DoesNotExist(
            f"No message is stored under seq {message.seq} of writer {message.writer}."
        )
    if bytes(rows[0][0]) != message.digest:
        raise WriterConflictError(
            f"Another message is stored under seq {message.seq} of writer {message.writer}.",
            "Another process uses this writer id. Resend unacknowledged messages under a new one.",
        )


def message_counts(run_id: UUID) -> dict[UUID, tuple[int, int]]:
    """Return, by writer, the number of messages received and the number missing below the highest seq."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT writer, count(*), max(seq) + 1 - count(*)
            FROM ingest_receipt WHERE run_id = %s GROUP BY writer
            """,
            [run_id],
        )
        return {writer: (int(received), int(missing)) for writer, received, missing in cursor.fetchall()}
