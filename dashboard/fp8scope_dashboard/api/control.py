"""Reports of training processes, commands to them, and the history of both."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from django.db import transaction
from django.http import HttpRequest
from ninja import Body, Field, Query, Router, Schema, Status

from fp8scope_dashboard.api.auth import ADMINISTRATOR, RUN_READER, WRITER, run_of, take_quota, token_of
from fp8scope_dashboard.api.responses import ANSWERS, ERRORS, Known, take
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.control import reports, schemas
from fp8scope_dashboard.control.commands import (
    MESSAGE_LENGTH,
    CommandError,
    accepted_kinds,
    give,
    giver_of,
    state_of,
)
from fp8scope_dashboard.control.models import Command, Report
from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire import schemas as wire
from fp8scope_dashboard.wire.errors import InvalidError, UnknownNameError

router = Router(tags=["control"], auth=RUN_READER)


LATEST = 1_000


class CommandOut(Schema):
    """A command. `state` is that over all processes, `message` and `step` those of their latest result."""

    id: int
    kind: str
    arguments: dict[str, Any]
    reason: str
    given_by: str
    given_at: datetime
    state: str
    message: str
    step: int | None


class ReportOut(Schema):
    """A stored report of a process; `document` has the fields of its kind."""

    kind: str
    step: int
    stored_at: datetime
    document: dict[str, Any]


class HistoryOut(Schema):
    """The latest commands to a run and reports of its processes, newest first.

    `accepts` are the kinds of commands that its processes accept now.
    """

    accepts: list[str]
    commands: list[CommandOut]
    reports: list[ReportOut]


@router.get("/runs/{run}/history", response={200: HistoryOut, ERRORS: wire.ErrorOut})
def get_history(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The commands that were given to a run with their results, and the reports of its processes."""
    stored = run_of(request, run)
    commands = Command.objects.filter(run=stored).select_related("given_by").prefetch_related("results")
    return {
        "accepts": accepted_now(stored),
        "commands": [_command(command) for command in commands[:LATEST]],
        "reports": list(Report.objects.filter(run=stored).order_by("-id")[:LATEST]),
    }


def accepted_now(run: Run) -> list[str]:
    """The kinds of commands that can be given to a run now; none if it is over."""
    return sorted(accepted_kinds(run)) if run.state in (RunState.RUNNING, RunState.SILENT) else []


class CommandIn(Schema):
    """A command to the processes of a run; docs/control.md has the arguments of each kind."""

    kind: Annotated[str, Field(max_length=32)]
    arguments: dict[str, Any] = {}
    reason: Annotated[str, Field(max_length=MESSAGE_LENGTH)] = ""


@router.post("/runs/{run}/commands", response={201: CommandOut, ERRORS: wire.ErrorOut}, auth=ADMINISTRATOR)
def give_command(request: HttpRequest, run: UUID, body: CommandIn) -> Status[Any]:
    """Give a command that the training script accepts; its processes get it with their next message."""
    stored = run_of(request, run)
    user, reason = token_of(request).created_by, body.reason.replace("\0", "").strip()
    try:
        with transaction.atomic():
            command = give(stored, body.kind, body.arguments, user=user, reason=reason)
            text = f"{command.get_kind_display().lower()}, to the run “{stored.name}”"
            record(actor_of(request), stored.project, Action.COMMAND, text, run=str(stored.pk))
    except CommandError as error:
        accepted = ", ".join(accepted_now(stored)) or "none"
        raise InvalidError(str(error)[:500], f"The run accepts now: {accepted}.") from None
    return Status(201, _command(command))


class ConsoleLineOut(Schema):
    """A line of the console log. `id` is for `before`."""

    id: int
    rank: int
    attempt: int
    number: int
    time: datetime
    step: int
    stream: str
    text: str


class ConsoleOut(Schema):
    """Lines of the console log, in their order."""

    lines: list[ConsoleLineOut]


@router.get("/runs/{run}/console", response={200: ConsoleOut, ERRORS: wire.ErrorOut})
def get_console(
    request: HttpRequest,
    run: UUID,
    rank: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    q: Annotated[str, Query(max_length=200)] = "",
    before: Annotated[int | None, Query(ge=0, le=limits.MAX_INT)] = None,
    limit: Annotated[int, Query(ge=1, le=LATEST)] = LATEST,
) -> dict[str, Any]:
    """The newest lines of the console log of a rank, or those before the line with the id `before`."""
    writers = console.writers_with_lines(run_of(request, run), rank)
    query = q.replace("\0", "")
    edge = console.line_of(writers, before) if before is not None else None
    if before is not None and edge is None:
        raise UnknownNameError(
            f"The console log of rank {rank} has no line {before}.", "Begin without `before`."
        )
    chosen = (
        console.newest(writers, limit, query) if edge is None else console.before(writers, edge, limit, query)
    )
    return {
        "lines": [
            {"id": line.pk, "rank": line.writer.rank, "attempt": line.writer.attempt, **console.as_json(line)}
            for line in chosen
        ]
    }


def _command(command: Command) -> dict[str, Any]:
    results = list(command.results.all())
    last = results[-1] if results else None
    return {
        "id": command.pk,
        "kind": command.kind,
        "arguments": command.arguments,
        "reason": command.reason,
        "given_by": giver_of(command),
        "given_at": command.given_at,
        "state": state_of(command, results),
        "message": last.message if last else "",
        "step": last.step if last else None,
    }


@router.post("/runs/{run}/reports", response=ANSWERS, auth=WRITER)
def send_report(
    request: HttpRequest, run: UUID, body: Body[schemas.ReportIn], received: Query[Known]
) -> Status[Any]:
    """Store a bisection, reference window, annotation, command result, or the list of accepted commands."""
    if isinstance(body, schemas.ConsoleIn):
        take_quota(request, console_lines=len(body.lines))
    return take(request, run, body, "report", partial(reports.store, body=body), received)
