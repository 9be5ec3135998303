"""Reports of training processes, and the history of what was ordered and reported."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Body, Query, Router, Schema, Status

from fp8scope_dashboard.api.auth import run_of
from fp8scope_dashboard.api.responses import ANSWERS, ERRORS, Known, take
from fp8scope_dashboard.control import reports, schemas
from fp8scope_dashboard.control.commands import giver_of, state_of
from fp8scope_dashboard.control.models import Command, Report
from fp8scope_dashboard.wire import schemas as wire

router = Router(tags=["control"])


LATEST = 1_000


class CommandOut(Schema):
    """A command. `state` is that over all processes, `message` and `step` those of their latest result."""

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
    """The latest commands to a run and reports of its processes, newest first."""

    commands: list[CommandOut]
    reports: list[ReportOut]


@router.get("/runs/{run}/history", response={200: HistoryOut, ERRORS: wire.ErrorOut})
def get_history(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The commands that were given to a run with their results, and the reports of its processes."""
    stored = run_of(request, run)
    commands = Command.objects.filter(run=stored).select_related("given_by").prefetch_related("results")
    return {
        "commands": [_command(command) for command in commands[:LATEST]],
        "reports": list(Report.objects.filter(run=stored).order_by("-id")[:LATEST]),
    }


def _command(command: Command) -> dict[str, Any]:
    results = list(command.results.all())
    last = results[-1] if results else None
    return {
        "kind": command.kind,
        "arguments": command.arguments,
        "reason": command.reason,
        "given_by": giver_of(command),
        "given_at": command.given_at,
        "state": state_of(command, results),
        "message": last.message if last else "",
        "step": last.step if last else None,
    }


@router.post("/runs/{run}/reports", response=ANSWERS)
def send_report(
    request: HttpRequest, run: UUID, body: Body[schemas.ReportIn], known: Query[Known]
) -> Status[Any]:
    """Store a bisection, reference window, annotation, command result, or the list of accepted commands."""
    return take(request, run, body, "report", partial(reports.store, body=body), known)
