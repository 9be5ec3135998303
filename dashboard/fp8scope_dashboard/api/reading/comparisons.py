"""Verdicts: a run against its baseline, its scores, and two runs against each other."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.api.auth import READER, RUN_READER, project_of, run_of
from fp8scope_dashboard.api.ingest import router as ingest
from fp8scope_dashboard.api.reading.answers import as_judged_score, as_reference, as_verdict
from fp8scope_dashboard.api.reading.schemas import EvaluationsOut, PairOut, VerdictOut
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.pages.compare.runs import result_of
from fp8scope_dashboard.pages.configuration_differences import differences_of
from fp8scope_dashboard.pages.run.quantities import cost_line
from fp8scope_dashboard.pages.run.summary import HOW_TO_SET_BASELINE, baseline_groups, verdict_of
from fp8scope_dashboard.pages.scores.figures import interval_of
from fp8scope_dashboard.pages.scores.forest import kinds_of, latest_comparisons
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire import limits, schemas

MAX_SCORES = 1_000

router = Router(tags=["analysis"], auth=RUN_READER)
Step = Annotated[int | None, Query(ge=0, le=limits.MAX_INT, description="Default: the last of each task.")]


@router.get("/runs/{run}/verdict", response={200: VerdictOut, ERRORS: schemas.ErrorOut})
def get_verdict(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The verdict on the run's loss, as its page shows it, or why there is none."""
    stored = run_of(request, run)
    return as_verdict(verdict_of(stored, baseline_groups(stored.project_id)), stored)


# Django takes the first pattern of an address, so that all methods of one address are in one router.
@ingest.get(
    "/runs/{run}/evaluations",
    response={200: EvaluationsOut, ERRORS: schemas.ErrorOut},
    auth=RUN_READER,
    tags=["analysis"],
)
def get_evaluations(request: HttpRequest, run: UUID, step: Step = None) -> dict[str, Any]:
    """The run's evaluation scores with their intervals, newest first, and those against its baseline."""
    stored = run_of(request, run)
    scores = Evaluation.scores.filter(run=stored)
    if step is not None:
        scores = scores.filter(step=step)
    return {
        "scores": [_score(row, stored) for row in scores.order_by("-step", "name", "metric")[:MAX_SCORES]],
        "comparisons": _judged_scores(stored, step),
    }


def _score(row: Evaluation, run: Run) -> dict[str, Any]:
    interval = interval_of(row, run.project.alpha)
    return {
        "name": row.name,
        "metric": row.metric,
        "step": row.step,
        "kind": row.kind,
        "higher_is_better": row.higher_is_better,
        "score": sum(row.items) / len(row.items) if row.items else None,
        "interval": interval,
        "items": len(row.items),
        "precision": row.precision,
    }


def _judged_scores(run: Run, step: int | None = None) -> list[dict[str, Any]]:
    rows = latest_comparisons(run.project, [run.pk], step)
    kinds = kinds_of(run.project, {(row.name, row.metric) for row in rows})
    return [as_judged_score(row, kinds[row.name, row.metric]) for row in rows]


@router.get("/compare", response={200: PairOut, ERRORS: schemas.ErrorOut}, auth=READER)
def compare_runs(request: HttpRequest, a: UUID, b: UUID) -> dict[str, Any]:
    """The verdict of two runs of which one is the other's baseline, or belongs to it.

    A verdict is about a run and all runs of its baseline. It is the one that their pages show.
    """
    first, second = run_of(request, a), run_of(request, b)
    server = server_address(request)
    judged = _judged_of(first, second)
    named = {
        "a": as_reference(first, server),
        "b": as_reference(second, server),
        "configuration": _differing_entries(first, second),
    }
    if judged is None:
        nothing: dict[str, Any] = {
            "judged": None,
            "verdict": None,
            "costs": "",
            "quantities": {},
            "evaluations": [],
        }
        return {**named, **nothing, "reason": _why_not(first, second)}
    quantities = result_of(judged).get("quantities") or {}
    verdict = verdict_of(judged, baseline_groups(project_of(request).pk))
    return {
        **named,
        "judged": as_reference(judged, server),
        "verdict": as_verdict(verdict, judged),
        "reason": "" if verdict.verdict else verdict.explanation,
        "costs": cost_line(quantities),
        "quantities": quantities,
        "evaluations": _judged_scores(judged),
    }


def _differing_entries(first: Run, second: Run) -> list[dict[str, Any]]:
    """The entries in which the configurations differ, as the page compares them."""
    if first.pk == second.pk:
        return []
    compared = differences_of([first, second])
    rows = [(row.key, [value.text for value in row.values]) for row in compared.rows]
    return [{"key": key, "a": values[0], "b": values[1]} for key, values in rows]


def _judged_of(first: Run, second: Run) -> Run | None:
    """The one of two runs whose baseline the other is; None if neither is."""
    for run, other in ((second, first), (first, second)):
        if any(baseline.pk == other.pk for baseline in comparison_runs.baseline_runs(run)):
            return run
    return None


def _why_not(first: Run, second: Run) -> str:
    if first.pk == second.pk:
        return "It is one run. Name two."
    if first.group and (first.group, first.baseline) == (second.group, second.baseline):
        return f"Both are seeds of the group “{first.group}”: compare one of them with a run of its baseline."
    return f"Neither run is the other's baseline. To compare them, set {HOW_TO_SET_BASELINE}."
