"""The runs that are compared with each other, and whether their comparisons include all stored data."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from django.db.models import Count, Max, Q, QuerySet, Sum
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run, Writer

# Runs of one arm that a comparison reads: the newest, if there are more.
MAX_SEEDS = 32
# Runs that one change causes to be compared again at once; the sweeper finds the others.
MAX_DEPENDENTS = 64
MAX_CHILDREN = 50
# Sweepers consider projects with activity within this time.
ACTIVE_WITHIN = timedelta(days=2)
# Prefix of `Comparison.inputs`. Raise it when a comparison of the same data gets another result.
VERSION = "v7"


def arm_named(names: Collection[str]) -> Q:
    """The runs that baselines name: those of the groups, and those with the ids."""
    ids = [run_id for name in names if (run_id := as_run_id(name)) is not None]
    return Q(group__in=names) | Q(pk__in=ids) if ids else Q(group__in=names)


def as_run_id(name: str) -> UUID | None:
    """The id of a run that a baseline or parent names, in its canonical form; None for other texts."""
    try:
        run_id = UUID(name)
    except ValueError:
        return None
    return run_id if str(run_id) == name else None


def baseline_runs(run: Run) -> list[Run]:
    """The runs that a run is compared with, oldest first; empty if it names no baseline."""
    if not run.baseline:
        return []
    group = Run.objects.filter(arm_named([run.baseline]), project_id=run.project_id).exclude(pk=run.pk)
    return sorted(group.order_by("-created_at", "id")[:MAX_SEEDS], key=lambda run: (run.created_at, run.id))


def baseline_label(run: Run) -> str:
    """Return what a run is compared with, for people: the name of the group, or that of the run."""
    run_id = as_run_id(run.baseline)
    if run_id is None:
        return run.baseline
    named = Run.objects.filter(project_id=run.project_id, pk=run_id).values_list("name", flat=True).first()
    return named or run.baseline


def parent_of(run: Run) -> Run | None:
    """The run that a run comes from; None if it names none, or one that is not stored in the project."""
    run_id = as_run_id(run.parent)
    if run_id is None or run_id == run.pk:
        return None
    return Run.objects.filter(project_id=run.project_id, pk=run_id).first()


def children_of(run: Run) -> list[Run]:
    """The runs that come from a run, by name and relation, oldest first; the newest MAX_CHILDREN."""
    children = Run.objects.filter(project_id=run.project_id, parent=str(run.pk)).exclude(pk=run.pk)
    named = children.only("name", "relation", "created_at")
    return list(named.order_by("-created_at", "id")[:MAX_CHILDREN])[::-1]


def siblings(run: Run) -> list[Run]:
    """The other runs that differ from a run only in their seed, oldest first."""
    if not run.group:
        return []
    group = Run.objects.filter(project_id=run.project_id, group=run.group, baseline=run.baseline)
    newest = group.exclude(pk=run.pk).order_by("-created_at", "id")[: MAX_SEEDS - 1]
    return sorted(newest, key=lambda run: (run.created_at, run.id))


def dependents(run: Run) -> list[UUID]:
    """The runs whose comparisons a run takes part in: those with it or its group as baseline, and its
    siblings.
    """
    involved = Q(baseline__in={str(run.id), run.group} - {""})
    if run.group:
        involved |= Q(group=run.group, baseline=run.baseline) & ~Q(baseline="")
    runs = (
        Run.objects.filter(involved, project_id=run.project_id).exclude(pk=run.pk).order_by("-heartbeat_at")
    )
    return list(runs.values_list("id", flat=True)[:MAX_DEPENDENTS])


def compared_among(run_ids: Collection[UUID]) -> list[UUID]:
    """Those of the runs that take part in a comparison: with a baseline, or named by another run as one."""
    runs = Run.objects.filter(pk__in=run_ids)
    named = Run.objects.filter(project__in=runs.values("project")).exclude(baseline="")
    baselines = set(named.values_list("project", "baseline").distinct())
    return [
        run_id
        for run_id, project, group, baseline in runs.values_list("id", "project", "group", "baseline")
        if baseline or (project, group) in baselines or (project, str(run_id)) in baselines
    ]


def reached_steps(runs: Iterable[Run]) -> dict[UUID, int | None]:
    """The last stored step of each run's latest attempt: an earlier one may have gone further."""
    listed = list(runs)
    rows = Writer.objects.filter(run__in=listed, last_step__isnull=False).order_by()
    latest: dict[UUID, tuple[int, int]] = {}
    for run_id, attempt, last in rows.values_list("run_id", "attempt").annotate(Max("last_step")):
        latest[run_id] = max(latest.get(run_id, (attempt, last)), (attempt, last))
    return {run.id: latest[run.id][1] if run.id in latest else run.last_step for run in listed}


def inputs_of(run: Run) -> str:
    """A fingerprint of the data that a comparison of the run uses; equal if nothing has changed.

    Read it before the data. Then data that arrives in the meantime makes the comparison stale, so that it is
    repeated.
    """
    involved = Run.objects.filter(
        arm_named({run.group, run.baseline, str(run.id)} - {""}), project_id=run.project_id
    )
    return _inputs(run, run.project, _stored(involved))


def rows_behind(run: Run) -> int:
    """Number of rows of the run and its baseline, which the detectors have to read."""
    involved = Run.objects.filter(arm_named({run.baseline, str(run.id)} - {""}), project_id=run.project_id)
    return involved.aggregate(rows=Sum("rows_stored"))["rows"] or 0


def active_projects() -> list[Project]:
    """Projects with a run that sent something recently."""
    recent = Run.objects.filter(heartbeat_at__gt=timezone.now() - ACTIVE_WITHIN)
    return list(Project.objects.filter(pk__in=recent.values("project_id")))


def _projects_to_sweep() -> list[Project]:
    """Active projects, and those with comparisons of an earlier version, which have no coverage."""
    earlier = Comparison.objects.filter(run__deleted_at=None).exclude(inputs__startswith=VERSION)
    projects = (*active_projects(), *Project.objects.filter(pk__in=earlier.values("run__project_id")))
    return list({project.pk: project for project in projects}.values())


def uncompared_runs() -> list[UUID]:
    """Runs with a baseline whose latest comparison does not include all stored data."""
    stale = []
    for project in _projects_to_sweep():
        runs = Run.objects.filter(project=project)
        stored = _stored(runs)
        for run in runs.exclude(baseline="").select_related("comparison"):
            comparison = getattr(run, "comparison", None)
            if comparison is None or comparison.inputs != _inputs(run, project, stored):
                stale.append(run.id)
    return stale


@dataclass
class _Stored:
    """The stored data of the runs of one group: rows, evaluations and the state of each run."""

    rows: int = 0
    evaluations: int = 0
    states: list[str] = field(default_factory=list)


def _stored(runs: QuerySet[Run]) -> dict[str, _Stored]:
    """Stored data by group, and by id."""
    scored = Evaluation.scores.filter(run__in=runs).values_list("run_id")
    evaluations: dict[UUID, int] = dict(scored.annotate(Count("id")))
    totals: dict[str, _Stored] = defaultdict(_Stored)
    fields = runs.order_by("id").values_list("id", "group", "rows_stored", "state", "total_steps")
    for run_id, group, rows, state, planned in fields:
        for name in {group, str(run_id)} - {""}:
            stored = totals[name]
            stored.rows += rows
            stored.evaluations += evaluations.get(run_id, 0)
            stored.states.append(f"{run_id} {state} {planned}")
    return totals


def _inputs(run: Run, project: Project, stored: Mapping[str, _Stored]) -> str:
    arms = [stored.get(arm, _Stored()) for arm in sorted({run.group or str(run.id), run.baseline} - {""})]
    rows, evaluations = sum(arm.rows for arm in arms), sum(arm.evaluations for arm in arms)
    states = hashlib.sha256(repr([arm.states for arm in arms]).encode()).hexdigest()[:16]
    margin = f"{project.margin if run.margin is None else run.margin:g}"
    if run.margin_nats is not None:
        margin = f"{run.margin_nats:g} nats"
    return f"{VERSION} {rows} rows, {evaluations} scores, {margin}, {project.alpha:g}, {states}"
