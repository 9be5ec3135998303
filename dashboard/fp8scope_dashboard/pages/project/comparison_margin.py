"""The form that changes the margin of one comparison, beside its verdict."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from fp8scope_dashboard.accounts.models import Project, Role
from fp8scope_dashboard.analysis.margins import MarginError, choose_margin
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.pages.access import POST, back_to, in_project, run_of
from fp8scope_dashboard.pages.formatting import percent


@in_project(Role.MEMBER, methods=POST)
def comparison_margin(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Change the margin of a run and its seeds, entered in per cent; empty means that of the project."""
    run = run_of(project, run_id)
    text = request.POST.get("margin", "").strip().removesuffix("%").replace(",", ".")
    try:
        changed = choose_margin(run, float(text) / 100.0 if text else None)
    except MarginError as error:
        messages.error(request, str(error))
    except ValueError:
        messages.error(request, "A margin is a number in per cent, such as 0.25.")
    else:
        name = run.group or run.name
        margin = percent(run.equivalence_margin)
        said = f"margin of “{name}” against “{run.baseline}”: {margin}"
        record(actor_of(request), project, Action.RUNS_CHANGED, said)
        runs = "1 run is" if changed == 1 else f"{changed} runs are"
        messages.success(request, f"{runs} judged with the margin {margin} within a minute.")
    return back_to(request, project, reverse("run", args=[project.slug, run.pk]))
