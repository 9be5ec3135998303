"""Take one batch: from its bytes to the answer. Needs no request of Django, which costs more than storing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from fp8scope_dashboard.api.pacing import pace
from fp8scope_dashboard.api.responses import Known, news_for, receipt
from fp8scope_dashboard.api.senders import SendingWriter, sender_of
from fp8scope_dashboard.edge.backpressure import gate
from fp8scope_dashboard.ingest import services
from fp8scope_dashboard.ingest.arrow_preflight import Envelope, open_envelope
from fp8scope_dashboard.ingest.batch import Batch, read_envelope, writer_of_envelope
from fp8scope_dashboard.ingest.json_batch import parse_json, read_json, writer_in
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.wire.errors import InvalidError, NotArrowError, RefusalError

ARROW: Final = "application/vnd.apache.arrow.stream"
JSON: Final = "application/json"


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A batch as it came.

    Attributes:
        secret: that of the token.
        kind: the content type, in lower case.
        received: the alerts and commands that the writer has.
        urgent: whether the sender says that an alert may follow.
    """

    run: UUID
    secret: str
    kind: str
    body: bytes
    received: Known
    urgent: bool = False


def take(sent: Sent) -> tuple[int, dict[str, Any]]:
    """Store a batch, and return status and body of the answer.

    Takes two statements for a batch of a writer that is known, besides those for news.

    Raises:
        RefusalError: it is not stored; nothing is said of the batch to a sender without permission.
    """
    began = time.thread_time()
    return _take_json(sent, began) if sent.kind == JSON else _take_arrow(sent, began)


def _take_arrow(sent: Sent, began: float) -> tuple[int, dict[str, Any]]:
    envelope, problem = _open(sent)
    writer = writer_of_envelope(envelope) if envelope is not None else None
    sender = sender_of(sent.secret, sent.run, writer, sent.received)
    if envelope is None:
        raise problem
    with gate.admit(envelope.decompressed_bytes + len(sent.body), sender.run.project_id):
        return _store(sent, sender, read_envelope(envelope, sent.body), began)


def _open(sent: Sent) -> tuple[Envelope | None, RefusalError]:
    """The envelope of an Arrow batch, or None and the reason."""
    problem: RefusalError = NotArrowError(
        f"A batch cannot be of type {sent.kind[:100]!r}.", f"Set Content-Type to {ARROW} or {JSON}."
    )
    try:
        return open_envelope(sent.body) if sent.kind == ARROW else None, problem
    except RefusalError as error:
        return None, error


def _take_json(sent: Sent, began: float) -> tuple[int, dict[str, Any]]:
    sender = sender_of(sent.secret, sent.run, None, sent.received)
    # Parsed JSON takes several times the size of its text.
    with gate.admit(8 * len(sent.body), sender.run.project_id):
        document = parse_json(sent.body)
        positions = services.tensor_positions(sender.run, writer_in(document))
        return _store(sent, sender, read_json(document, sent.run, positions), began)


def _store(sent: Sent, sender: SendingWriter, batch: Batch, began: float) -> tuple[int, dict[str, Any]]:
    if batch.run != sender.run.id:
        raise InvalidError(
            f"The message belongs to run {batch.run}.", "fp8scope.run must be the run in the address."
        )
    message = identify(batch.run, batch.writer, batch.seq, "batch", sent.body)
    stored = services.store_batch(sender.run, message, batch, urgent=sent.urgent, writer=sender.writer)
    news = news_for(sender.run, batch.writer, sent.received, sender.news)
    status, document = receipt(message, stored, news, rows=batch.rows, points=batch.points)
    return status, {**document, "pause": round(pace.after(batch.writer, time.thread_time() - began), 3)}
