"""The facts for the one paragraph about a run, read from its stored verdicts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from django.db.models import Count

from fp8scope_dashboard.alerts.models import Alert, RuleKind
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.score_comparisons import summary_of
from fp8scope_dashboard.analysis.verdict_coverage import standing_now
from fp8scope_dashboard.pages.charts.arms import precision_label
from fp8scope_dashboard.pages.formatting import difference
from fp8scope_dashboard.pages.run.summary import ShownVerdict, summarise
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import count
from fp8scope_dashboard.text.run_summary import RunFacts

MAX_RECIPE_ENTRIES = 5
# What only its documentation explains.
UNSAID = ("nonfinite", "saturate")
HOLDS_FOR_A_PART = "What follows holds for the compared steps only."


def run_facts(run: Run) -> RunFacts:
    """The facts of a run as they are now. `run` has its project and comparison."""
    summary = summarise(run)
    verdict, overflow = summary.verdict, summary.overflow
    has_verdict = verdict.delta is not None or getattr(run, "comparison", None) is not None
    return RunFacts(
        name=run.name,
        precision=precision_label(run.precision),
        recipe=recipe_in_words(run.recipe),
        seed=run.seed,
        reached=run.total_steps if _has_all_steps(run) else run.last_step,
        planned=run.total_steps,
        baseline=_baseline(run),
        unpaired=run.precision != "bf16" and not run.baseline,
        loss=_loss(verdict) if has_verdict else "",
        coverage=verdict.coverage if has_verdict else "",
        incomplete=f"{verdict.reason} {HOLDS_FOR_A_PART}" if has_verdict and verdict.reason else "",
        scores=_scores(run),
        overflowing=None if overflow is None else overflow.overflowing,
        observed=None if overflow is None else overflow.observed,
        worst_rate=overflow.worst[0].rate if overflow is not None and overflow.worst else None,
        alerts=_alerts(run),
        version=own_version(),
    )


def _loss(verdict: ShownVerdict) -> str:
    """The verdict, and before that on a group the run's own difference."""
    if not verdict.is_of_group:
        return verdict.explanation
    own = "This run has no finite loss."
    if verdict.own is not None:
        own = f"This run's own difference is {difference(verdict.own, verdict.unit, signed=True)}."
    return f"{own} Its group of {count(verdict.runs, 'run')}: {verdict.explanation}"


def steps_in_words(run: Run) -> str:
    """`300 of 500`, `500` if the run did all that were planned, or if no number was; `–` without a step."""
    if _has_all_steps(run):
        return f"{run.total_steps:,}"
    reached = "–" if run.last_step is None else f"{run.last_step:,}"
    return f"{reached} of {run.total_steps:,}" if run.total_steps else reached


def _has_all_steps(run: Run) -> bool:
    """Return whether the run did all planned steps; a script that counts from 0 ends at one less."""
    return bool(run.total_steps) and standing_now(run) == "finished"


def recipe_in_words(recipe: dict[str, Any]) -> str:
    """A recipe's name and its plain entries, e.g. `DelayedScaling, history 16, margin 0`."""
    name = recipe.get("recipe") or recipe.get("name") or ""
    plain = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in recipe.items()
        if key not in ("recipe", "name", *UNSAID)
        and isinstance(value, int | float | str)
        and not isinstance(value, bool)
        and value != ""
    ]
    return ", ".join([str(name), *plain[:MAX_RECIPE_ENTRIES]] if name else plain[:MAX_RECIPE_ENTRIES])


def own_version() -> str:
    """The version of fp8scope; empty if it runs without being installed."""
    try:
        return version("fp8scope")
    except PackageNotFoundError:
        return ""


def _baseline(run: Run) -> str:
    baselines = comparison_runs.baseline_runs(run)
    if not baselines:
        return ""
    precisions = sorted({precision_label(baseline.precision) for baseline in baselines})
    seeds = sorted({baseline.seed for baseline in baselines if baseline.seed is not None})
    with_seeds = f" (seeds {', '.join(map(str, seeds))})" if len(seeds) > 1 else ""
    noun = f"{'/'.join(precisions)} run"
    return f"{count(len(baselines), noun)}{with_seeds}"


def _scores(run: Run) -> str:
    """The verdict over the tasks of the last compared checkpoint."""
    rows = EvaluationComparison.objects.filter(run=run).select_related("run", "run__project")
    last = rows.order_by("-step").values_list("step", flat=True).first()
    if last is None:
        return ""
    return f"Evaluations at step {last:,}: {summary_of(run, list(rows.filter(step=last))).explanation}"


def _alerts(run: Run) -> list[tuple[str, int]]:
    kinds = Alert.objects.filter(run=run).order_by().values_list("kind", "rule_name")
    labels = dict(RuleKind.choices)
    return [
        (str(name or labels.get(kind, kind)), number)
        for kind, name, number in kinds.annotate(number=Count("id")).order_by("-number", "kind", "rule_name")
    ]
