"""The card of related runs: choose a baseline or a seed group, and undo it."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import baseline_choice, comparison_runs
from fp8scope_dashboard.analysis.suggestions import suggested_group
from fp8scope_dashboard.pages.access import POST, in_project, page, person, run_of
from fp8scope_dashboard.pages.run.related import offered_groups, offered_runs, related_runs_of
from fp8scope_dashboard.runs.models import Choice, Run


@in_project()
def related_runs(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The card, for a refresh."""
    return page(
        request, project, "runs", "pages/run/_related_runs.html", related_context(run_of(project, run_id))
    )


def related_context(run: Run) -> dict[str, object]:
    """Return what `pages/_related_runs.html` needs."""
    return {
        "run": run,
        "related": related_runs_of(run),
        "groups": offered_groups(run),
        "others": offered_runs(run),
    }


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def baseline_new(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Choose the baseline of a run and of its seeds."""
    run = run_of(project, run_id)
    value = request.POST.get("baseline", "")
    try:
        changed = baseline_choice.choose_baseline(
            run, value, user=person(request), suggested=request.POST.get("suggested") == "1"
        )
    except baseline_choice.ChoiceError as error:
        messages.error(request, str(error))
    else:
        run.baseline = value
        compared = (
            f"compared with “{comparison_runs.baseline_label(run)}”" if value else "compared with no baseline"
        )
        messages.success(request, f"{_count(changed)} {compared} from now on.")
    return _back(run)


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def group_new(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Accept the suggested seed group of a run."""
    run = run_of(project, run_id)
    suggested = suggested_group(run)
    if suggested is None:
        messages.error(request, "There is no suggestion any more: the runs have changed.")
        return _back(run)
    runs = list(Run.objects.filter(project=project, pk__in=suggested.ids, group=""))
    try:
        changed = baseline_choice.choose_group(runs, suggested.name, user=person(request))
    except baseline_choice.ChoiceError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"{_count(changed)} in the group “{suggested.name}” from now on.")
    return _back(run)


@in_project(permissions.DESCRIBE_RUNS, methods=POST)
def choice_undo(request: HttpRequest, project: Project, run_id: UUID, field: str) -> HttpResponse:
    """Undo the latest choice of a run's baseline or group."""
    run = run_of(project, run_id)
    try:
        changed = baseline_choice.undo(run, Choice.Field(field), user=person(request))
    except baseline_choice.ChoiceError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"Undone for {len(changed)} run{'s'[: len(changed) != 1]}.")
    return _back(run)


def _count(runs: Sequence[Run]) -> str:
    return "1 run is" if len(runs) == 1 else f"{len(runs)} runs are"


def _back(run: Run) -> HttpResponse:
    return redirect(f"{reverse('run', args=[run.project.slug, run.id])}#related-runs")
