"""Reports of training processes: bisections, reference windows, annotations, results of commands."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Body, Query, Router, Status

from fp8scope_dashboard.api.responses import ANSWERS, Known, take
from fp8scope_dashboard.control import reports, schemas

router = Router(tags=["control"])


@router.post("/runs/{run}/reports", response=ANSWERS)
def send_report(
    request: HttpRequest, run: UUID, body: Body[schemas.ReportIn], known: Query[Known]
) -> Status[Any]:
    """Store a bisection, reference window, annotation, command result, or the list of accepted commands."""
    return take(request, run, body, "report", partial(reports.store, body=body), known)
