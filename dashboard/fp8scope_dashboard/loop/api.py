"""What a run tells about itself, over HTTP."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Body, Router, Status

from fp8scope_dashboard.ingest.api import ANSWERS, AlertsAfter, CommandsAfter, answer
from fp8scope_dashboard.ingest.auth import run_of
from fp8scope_dashboard.ingest.ledger import identify
from fp8scope_dashboard.loop import reports, schemas

router = Router(tags=["loop"])


@router.post("/runs/{run}/reports", response=ANSWERS)
def send_report(
    request: HttpRequest,
    run: UUID,
    body: Body[schemas.ReportIn],
    alerts_after: AlertsAfter = 0,
    commands_after: CommandsAfter = None,
) -> Status[Any]:
    """Store a bisection, a reference window, an annotation, a command's result, or the commands taken."""
    found = run_of(request, run)
    message = identify(found.id, body.writer, body.seq, "report", request.body)
    stored = reports.store(found, message, body)
    return answer(found, message, stored, alerts_after, commands_after)
