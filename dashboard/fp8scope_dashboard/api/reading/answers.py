"""The numbers of stored results as answers: verdicts, runs and scores, by the functions of the pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from django.conf import settings

from fp8scope_dashboard.alerts.services import unjudged
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.verdict_coverage import judged_now
from fp8scope_dashboard.pages.badges import score_badge
from fp8scope_dashboard.pages.formatting import number, points
from fp8scope_dashboard.pages.run.summary import ShownVerdict
from fp8scope_dashboard.pages.scores.forest import TaskKind, mean_score, wider_limit
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.services import page_url


def as_reference(run: Run, server: str = "") -> dict[str, Any]:
    """A run that an answer names. `server`: its address for the client."""
    return {"id": run.pk, "name": run.name, "url": page_url(run, server or settings.BASE_URL)}


def as_verdict(shown: ShownVerdict, run: Run | None = None) -> dict[str, Any]:
    """The verdict on a run's loss; with the run, `not_judged` also has what its rules cannot judge."""
    lacking = [shown.reason, *(unjudged(run) if run is not None else ())]
    return {
        "verdict": shown.verdict,
        "measured": shown.measured,
        "label": shown.badge.label,
        "explanation": shown.explanation,
        "final": shown.final,
        "unit": shown.unit,
        "delta": shown.delta,
        "interval": shown.interval,
        "tolerance": shown.tolerance,
        "margin": shown.margin,
        "smallest_detectable": shown.smallest_detectable,
        "own": shown.own,
        "left": shown.has_left,
        "baseline": shown.baseline,
        "baseline_runs": shown.seeds,
        "members": [dict(member) for member in shown.members],
        "coverage": shown.coverage,
        "not_judged": [reason for reason in lacking if reason],
        "warnings": list(shown.warnings),
    }


def as_judged_score(row: EvaluationComparison, kind: TaskKind) -> dict[str, Any]:
    """The comparison of a score, with the numbers that the forest plot writes as texts."""
    result: Mapping[str, Any] = row.result
    judgement = judged_now(row.run, row)
    badge = score_badge(judgement, wider_limit(result, points if kind.in_percent else number))
    return {
        "name": row.name,
        "metric": row.metric,
        "step": row.step,
        "higher_is_better": kind.higher_is_better,
        "verdict": judgement.verdict,
        "measured": judgement.measured,
        "label": badge.label,
        "explanation": str(result.get("explanation", "")),
        "score": mean_score(result),
        "baseline_score": result.get("baseline_score"),
        "difference": result.get("difference"),
        "interval": result.get("difference_interval"),
        "margin": result.get("margin"),
        "smallest_detectable": result.get("smallest_detectable"),
        "items": int(result.get("n") or 0),
        "members": [dict(member) for member in (result.get("group") or {}).get("runs", ())],
        "not_judged": [reason for reason in (judgement.reason, str(result.get("doubt") or "")) if reason],
        "warnings": [str(warning) for warning in result.get("warnings", ())],
    }


def finite_or_none(value: float) -> float | None:
    """A number that JSON has; None for others."""
    return float(value) if math.isfinite(value) else None
