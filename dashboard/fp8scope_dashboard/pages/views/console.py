"""The console log of a run: its lines, and as a file."""

from __future__ import annotations

from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.utils.text import slugify

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.console_lines import console_context
from fp8scope_dashboard.runs import console


@in_project()
def lines(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The list of lines, for a refresh."""
    run = run_of(project, run_id)
    context = {"run": run, **console_context(run, request.GET)}
    return page(request, project, "runs", "pages/_console_lines.html", context)


@in_project()
def text(request: HttpRequest, project: Project, run_id: UUID, rank: int) -> HttpResponse:
    """The whole console log of a rank as a text file."""
    run = run_of(project, run_id)
    answer = HttpResponse("".join(console.as_text(run, rank)), content_type="text/plain; charset=utf-8")
    name = f"{slugify(run.name)[:80] or 'run'}-rank{rank}.log"
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    answer["X-Content-Type-Options"] = "nosniff"
    return answer
