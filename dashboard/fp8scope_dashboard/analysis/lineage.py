"""Which runs are compared with which, and whether that was done with all they have stored."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from uuid import UUID

from django.db.models import Count, Q, QuerySet, Sum
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.models import Evaluation
from fp8scope_dashboard.runs.models import Run

# Runs of one arm that a comparison reads; the newest, where there are more.
MOST_SEEDS = 32
# Runs that one change may cause to be compared anew at once; the sweeper takes care of the others.
MOST_DEPENDENTS = 64
# Sweepers look at projects in which something happened this recently.
ACTIVE_WITHIN = timedelta(days=2)


def baseline_runs(run: Run) -> list[Run]:
    """The runs that a run is compared with, oldest first; empty when it names no baseline."""
    if not run.baseline:
        return []
    group = Run.objects.filter(project_id=run.project_id, group=run.baseline).exclude(pk=run.pk)
    return sorted(group.order_by("-created_at", "id")[:MOST_SEEDS], key=lambda one: (one.created_at, one.id))


def siblings(run: Run) -> list[Run]:
    """The other runs that differ from a run only in their seed, oldest first."""
    if not run.group:
        return []
    group = Run.objects.filter(project_id=run.project_id, group=run.group, baseline=run.baseline)
    found = group.exclude(pk=run.pk).order_by("-created_at", "id")[: MOST_SEEDS - 1]
    return sorted(found, key=lambda one: (one.created_at, one.id))


def dependents(run: Run) -> list[UUID]:
    """The runs whose comparisons a run takes part in: those with its group as baseline, and its siblings."""
    if not run.group:
        return []
    mine = Q(baseline=run.group) | (Q(group=run.group, baseline=run.baseline) & ~Q(baseline=""))
    found = Run.objects.filter(mine, project_id=run.project_id).exclude(pk=run.pk).order_by("-heartbeat_at")
    return list(found.values_list("id", flat=True)[:MOST_DEPENDENTS])


def inputs_of(run: Run) -> str:
    """What a comparison of the run is computed from, in a few characters: equal when nothing has changed.

    Read it before the data: what is stored meanwhile makes the comparison stale, not wrong for good.
    """
    groups = {run.group, run.baseline} - {""}
    involved = Run.objects.filter(Q(group__in=groups) | Q(pk=run.pk), project_id=run.project_id)
    return _inputs(run, run.project, _stored(involved))


def rows_behind(run: Run) -> int:
    """Rows of the run and of its baseline: what the detectors have to read."""
    groups = {run.baseline} - {""}
    involved = Run.objects.filter(Q(group__in=groups) | Q(pk=run.pk), project_id=run.project_id)
    return involved.aggregate(rows=Sum("rows_stored"))["rows"] or 0


def active_projects() -> list[Project]:
    """Projects of which some run was heard of lately."""
    recent = Run.objects.filter(heartbeat_at__gt=timezone.now() - ACTIVE_WITHIN)
    return list(Project.objects.filter(pk__in=recent.values("project_id")))


def uncompared_runs() -> list[UUID]:
    """Runs with a baseline whose latest comparison was computed from less than is stored now."""
    found = []
    for project in active_projects():
        runs = Run.objects.filter(project=project)
        stored = _stored(runs)
        for run in runs.exclude(baseline="").select_related("comparison"):
            comparison = getattr(run, "comparison", None)
            if comparison is None or comparison.inputs != _inputs(run, project, stored):
                found.append(run.id)
    return found


# By group, and by id where a run has no group: rows and evaluations stored.
_Stored = dict[str, tuple[int, int]]


def _stored(runs: QuerySet[Run]) -> _Stored:
    scored = Evaluation.objects.filter(run__in=runs).values_list("run_id")
    evaluations: dict[UUID, int] = dict(scored.annotate(Count("id")))
    totals: _Stored = defaultdict(lambda: (0, 0))
    for run_id, group, rows in runs.values_list("id", "group", "rows_stored"):
        before = totals[group or str(run_id)]
        totals[group or str(run_id)] = (before[0] + rows, before[1] + evaluations.get(run_id, 0))
    return totals


def _inputs(run: Run, project: Project, stored: _Stored) -> str:
    arms = {run.group or str(run.id), run.baseline} - {""}
    rows = sum(stored.get(arm, (0, 0))[0] for arm in arms)
    evaluations = sum(stored.get(arm, (0, 0))[1] for arm in arms)
    return f"{rows} rows, {evaluations} scores, {project.margin:g}, {project.alpha:g}"
