"""How messages are answered: what became of them, and the alerts and commands that their writer must know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Schema, Status

from fp8scope_dashboard.api.auth import run_of
from fp8scope_dashboard.receipts.dedup import MessageId, MessageKind, identify
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire import limits, schemas

ERRORS = frozenset({400, 401, 404, 409, 413, 422, 429, 500, 503, 507})
ANSWERS: dict[Any, Any] = {201: schemas.Receipt, 200: schemas.Receipt, ERRORS: schemas.ErrorOut}


class Known(Schema):
    """What of the run's alerts and commands the writer knows."""

    alerts_after: int = Field(
        0, ge=0, le=limits.LARGEST_INT, description="Greatest alert id that was handled."
    )
    commands_after: int | None = Field(
        None,
        ge=0,
        le=limits.LARGEST_INT,
        description="Greatest command id that was taken. Without it no commands come.",
    )


class Signed(Protocol):
    """A message in JSON, which says who sends it."""

    writer: UUID
    seq: int


def take(
    request: HttpRequest,
    run: UUID,
    said: Signed,
    kind: MessageKind,
    store: Callable[[Run, MessageId], bool],
    known: Known,
) -> Status[Any]:
    """Have a message in JSON stored, and answer it. `store` returns False where it was stored before."""
    found = run_of(request, run)
    message = identify(found.id, said.writer, said.seq, kind, request.body)
    return answer(found, message, store(found, message), known)


def answer(
    run: Run, message: MessageId, stored: bool, known: Known, *, rows: int = 0, points: int = 0
) -> Status[Any]:
    """The answer to a message."""
    body = {
        "status": "stored" if stored else "duplicate",
        "seq": message.seq,
        "rows": rows,
        "points": points,
        **tidings(run, message.writer, known),
    }
    return Status(201 if stored else 200, body)


def tidings(run: Run, writer: UUID, known: Known) -> dict[str, Any]:
    """The alerts and commands that this writer does not know yet."""
    from fp8scope_dashboard.alerts.services import alerts_after
    from fp8scope_dashboard.control.commands import commands_for

    commands = [] if known.commands_after is None else commands_for(run, writer, known.commands_after)
    return {"alerts": alerts_after(run.id, known.alerts_after), "commands": commands}
