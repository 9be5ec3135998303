"""The console log of a run: its lines, and as a file."""

from __future__ import annotations

from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.text import slugify

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.exports import streaming
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.run.console import console_context
from fp8scope_dashboard.runs import console
from fp8scope_dashboard.wire.errors import SlowDownError


@in_project()
def lines(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The list of lines, for a refresh."""
    run = run_of(project, run_id)
    context = {"run": run, **console_context(run, request.GET)}
    return page(request, project, "runs", "pages/run/_console_lines.html", context)


@in_project()
def text(request: HttpRequest, project: Project, run_id: UUID, rank: int) -> HttpResponseBase:
    """The whole console log of a rank as a text file, sent while it is read."""
    run = run_of(project, run_id)
    try:
        answer = streaming.respond_text(
            (piece.encode() for piece in console.as_text(run, rank)),
            f"{slugify(run.name)[:80] or 'run'}-rank{rank}.log",
        )
        said = f"“{run.name}”, the console log of rank {rank}"
        record(actor_of(request), project, Action.EXPORTED, said, run=str(run.pk))
        return answer
    except SlowDownError as error:
        return HttpResponse(f"{error.message} {error.hint}", status=429, headers=error.headers())
