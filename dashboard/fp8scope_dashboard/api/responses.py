"""Responses to messages: whether they were stored, and new alerts and commands for their writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Schema, Status

from fp8scope_dashboard.alerts.services import alerts_after
from fp8scope_dashboard.api.auth import run_of_message
from fp8scope_dashboard.control.commands import commands_for
from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.receipts.dedup import MessageId, MessageKind, identify
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire import limits, schemas

ERRORS = frozenset({400, 401, 403, 404, 409, 413, 422, 429, 500, 503, 507})
ANSWERS: dict[Any, Any] = {201: schemas.Receipt, 200: schemas.Receipt, ERRORS: schemas.ErrorOut}


# Part of the response to every message, most of which have no news: one statement instead of three.
HAS_ALERTS = """EXISTS (
        SELECT FROM alerts_event WHERE run_id = %(run)s AND coalesce(sent_again_as, id) > %(alerts)s
    )"""
HAS_COMMANDS = """EXISTS (
        SELECT FROM loop_command
        WHERE run_id = %(run)s AND id > %(commands)s::bigint AND expires_at > now()
    )"""
_HAS_NEWS = f"SELECT {HAS_ALERTS}, {HAS_COMMANDS}"


class News(NamedTuple):
    """A flag for alerts and commands that a writer does not have yet."""

    alerts: bool
    commands: bool


class Known(Schema):
    """The alerts and commands that the writer already has."""

    alerts_after: int = Field(0, ge=0, le=limits.MAX_INT, description="Greatest alert id that was received.")
    commands_after: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_INT,
        description="Greatest command id that was received. Without it, no commands are sent.",
    )


class Urgent(Schema):
    """The writer's statements about a batch."""

    urgent: bool = Field(
        False, description="An alert may follow from these rows: they are judged first, at a bounded rate."
    )


class Identified(Protocol):
    """A JSON message, which names its writer and seq."""

    writer: UUID
    seq: int


def take(
    request: HttpRequest,
    run: UUID,
    body: Identified,
    kind: MessageKind,
    store: Callable[[Run, MessageId], bool],
    received: Known,
) -> Status[Any]:
    """Store a JSON message and return the response. `store` returns False if it was stored before."""
    stored_run = run_of_message(request, run)
    message = identify(stored_run.id, body.writer, body.seq, kind, request.body)
    return answer(stored_run, message, store(stored_run, message), received)


def answer(run: Run, message: MessageId, stored: bool, received: Known) -> Status[Any]:
    """The response to a message."""
    return Status(*receipt(message, stored, news_for(run, message.writer, received)))


def receipt(
    message: MessageId, stored: bool, news: Mapping[str, Any], *, rows: int = 0, points: int = 0
) -> tuple[int, dict[str, Any]]:
    """Status and body of the response to a message; `stored` is False if it was stored before."""
    status = "stored" if stored else "duplicate"
    body = {"status": status, "seq": message.seq, "rows": rows, "points": points, **news}
    return 201 if stored else 200, body


def news_for(run: Run, writer: UUID, received: Known, news: News | None = None) -> dict[str, Any]:
    """The alerts and commands that the writer does not have yet; `news`: whether there are any, if known."""
    if news is None:
        parameters = {"run": run.pk, "alerts": received.alerts_after, "commands": received.commands_after}
        news = News(*sql.fetch(_HAS_NEWS, parameters, replica.PRIMARY)[0])
    return {
        "alerts": alerts_after(run.id, received.alerts_after) if news.alerts else [],
        "commands": commands_for(run, writer, received.commands_after or 0) if news.commands else [],
    }
