"""The form that changes the margin of one comparison, beside its verdict."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.margins import MarginError, choose_margin
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.pages.access import POST, back_to, in_project, run_of
from fp8scope_dashboard.pages.formatting import number, percent
from fp8scope_dashboard.runs.models import Run


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def comparison_margin(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Change the margin of a run and its seeds; empty means that of the project."""
    run = run_of(project, run_id)
    try:
        margin, in_nats = _margin_in(request.POST.get("margin", ""))
        changed = choose_margin(run, margin, in_nats=in_nats)
    except MarginError as error:
        messages.error(request, str(error))
    except ValueError:
        messages.error(request, "A margin is a number in per cent or in nats: 0.25 or 0.01 nats.")
    else:
        name = run.group or run.name
        shown = margin_of(run)
        said = f"margin of “{name}” against “{run.baseline}”: {shown}"
        record(actor_of(request), project, Action.RUNS_CHANGED, said)
        runs = "1 run is" if changed == 1 else f"{changed} runs are"
        messages.success(request, f"{runs} judged with the margin {shown} within a minute.")
    return back_to(request, project, reverse("run", args=[project.slug, run.pk]))


def _margin_in(text: str) -> tuple[float | None, bool]:
    """The margin that a person has entered, and whether it is in nats. Raises ValueError for other texts."""
    entered = text.strip().lower().replace(",", ".")
    if not entered:
        return None, False
    in_nats = entered.endswith(("nat", "nats"))
    value = float(entered.removesuffix("s").removesuffix("nat") if in_nats else entered.removesuffix("%"))
    return (value, True) if in_nats else (value / 100.0, False)


def margin_of(run: Run) -> str:
    """The margin of a run as it was chosen."""
    return percent(run.equivalence_margin) if run.margin_nats is None else f"{number(run.margin_nats)} nats"


def margin_entry(run: Run) -> str:
    """The run's own margin as a person enters it; empty where it is the project's."""
    if run.margin_nats is not None:
        return f"{run.margin_nats:.10g} nats"
    return "" if run.margin is None else f"{100.0 * run.margin:.10g}"
