"""Collect the inputs of a diagnosis by queries, bounded in number and size.

Reports and evaluations are read through the relations of Run where their apps are above this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.diagnosis.evaluation import Scored
from fp8scope_dashboard.diagnosis.findings import METHOD_VERSION
from fp8scope_dashboard.diagnosis.product import ProductRanking
from fp8scope_dashboard.diagnosis.reference import JudgedWindow, RunLoss
from fp8scope_dashboard.diagnosis.tensors import LARGEST, CataloguedTensor, Int64s, TensorSeries
from fp8scope_dashboard.diagnosis.weights import Moments
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries

# Values of one statistic in memory: tensors times steps.
MAX_CELLS: Final = 1_000_000
MAX_TENSORS: Final = 20_000
# Steps that are looked at around the trouble of a long run, at least.
MIN_STEPS: Final = 64
MAX_STEPS: Final = 2_000
MAX_BASELINES: Final = 3
MAX_CURVE_POINTS: Final = 20_000
MAX_WINDOWS: Final = 100
# Of an overview of the whole run, and the share of the run in which updates are not settled.
OVERVIEW_COLUMNS: Final = 64
SETTLED_SHARE: Final = 0.1
# Columns of the optimizer's state, and the roles that are not part of it.
MOMENT_COLUMNS: Final = 256
NO_MOMENTS: Final = ("input", "weight", "grad_output", "update", "")
MAX_SCORES: Final = 500
# Alerts of the app above this one, which tell since when a loss rises.
RISES: Final = ("loss_divergence", "above_baseline")
MAX_TOLD: Final = 100
COUNTS: Final = ("amax", "scale", "saturated", "underflow", "nonfinite", "numel")
ERRORS: Final = ("sq_error", "sq_signal")
# A running run is diagnosed again after this many new rows, relative to what it had.
GROWTH: Final = 0.1


@dataclass(frozen=True)
class GradientNorms:
    """log2 of the run's gradient norm over BF16's at common steps."""

    steps: Int64s
    bits: Floats


def inputs_of(run: Run) -> str:
    """A fingerprint of what a diagnosis uses. The rows of a running run count in steps of 10 %."""
    arms = [run, *baselines_of(run)]
    states = [(str(arm.id), _grown(arm), arm.state, arm.precision) for arm in arms]
    scores = Evaluation.scores.filter(run__in=arms).count()
    reports = run.reports.exclude(kind="annotation").count()
    verdict = getattr(getattr(run, "comparison", None), "verdict", "")
    told = told_rises(run)
    mixed = run.environment.get("mixed_versions")
    text = repr((states, scores, reports, verdict, run.recipe, mixed, told))
    return f"v{METHOD_VERSION} {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _grown(run: Run) -> int:
    if run.state != RunState.RUNNING:
        return int(run.rows_stored)
    return int(np.log(max(1, run.rows_stored)) / np.log1p(GROWTH))


def baselines_of(run: Run) -> list[Run]:
    """The BF16 runs to compare with: that of the same seed first, then the newest."""
    runs = [baseline for baseline in comparison_runs.baseline_runs(run) if baseline.precision != "fp8"]
    runs.sort(
        key=lambda baseline: (baseline.seed == run.seed and run.seed is not None, baseline.created_at),
        reverse=True,
    )
    return runs[:MAX_BASELINES]


def curve_of(run: Run) -> RunLoss:
    """The run's loss and learning rate; thinned if it is very long."""
    loss = queries.scalar(run.id, "loss", points=MAX_CURVE_POINTS, timed=False)
    rate = queries.scalar(run.id, "learning_rate", points=MAX_CURVE_POINTS, timed=False)
    rates = None
    if len(rate):
        places = np.clip(np.searchsorted(rate.steps, loss.steps, side="right") - 1, 0, None)
        rates = rate.values[places]
    update, growth = update_ratio(run), weight_growth(run)
    return RunLoss(
        name=run.name,
        steps=loss.steps,
        losses=loss.values,
        seed=run.seed,
        rates=rates,
        run=str(run.id),
        update=update,
        growth=growth,
        told=tuple(told_rises(run)),
    )


def told_rises(run: Run) -> list[int]:
    """The steps from which on the loss rises, or leaves its baseline, as alerts of the run say."""
    told = run.alerts.filter(kind__in=RISES).values_list("onset_step", flat=True)
    return sorted(set(told.order_by("onset_step")[:MAX_TOLD]))


def update_ratio(run: Run) -> float | None:
    """Median ratio of update to weight over all matrices, after the first tenth of the run."""
    if "update_ratio" not in run.statistics:
        return None
    ratios = queries.heatmap(run.id, "update_ratio", columns=OVERVIEW_COLUMNS)
    edges = ratios.step_edges
    later = edges[:-1] >= edges[0] + SETTLED_SHARE * (edges[-1] - edges[0])
    values = ratios.values[:, later]
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


def weight_growth(run: Run) -> float | None:
    """Ratio of the weights' amax in the last part of the run to that in the first; see `RunLoss.growth`."""
    if "amax" not in run.statistics:
        return None
    weights = Tensor.objects.filter(run=run, role="weight").order_by("index")[:MAX_TENSORS]
    indices = list(weights.values_list("index", flat=True))
    amax = queries.heatmap(run.id, "amax", tensors=indices, columns=OVERVIEW_COLUMNS).values
    if amax.shape[1] < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = amax[:, -1] / amax[:, 0]
    growth = growth[np.isfinite(growth)]
    return float(np.quantile(growth, 0.25)) if len(growth) else None


def last_step_of(run: Run) -> int | None:
    """The last stored step of the run; None before the first."""
    return run.last_step


def moments_of(run: Run) -> Moments | None:
    """The optimizer's state in an overview of the run; None if it was not observed."""
    if "amax" not in run.statistics:
        return None
    stored = Tensor.objects.filter(run=run).exclude(role__in=(*NO_MOMENTS, "weight_grad"))
    moments = list(stored.order_by("index").values_list("index", flat=True)[:MAX_TENSORS])
    gradients = list(
        Tensor.objects.filter(run=run, role="weight_grad").order_by("index").values_list("index", flat=True)
    )[:MAX_TENSORS]
    if not moments or not gradients:
        return None
    of_moments, of_gradients = (
        queries.heatmap(run.id, "amax", tensors=indices, columns=MOMENT_COLUMNS)
        for indices in (moments, gradients)
    )
    if of_moments.values.shape[1] != of_gradients.values.shape[1]:
        return None
    return Moments(
        of_moments.step_edges.astype(np.int64),
        _median_bits(of_moments.values),
        _median_bits(of_gradients.values),
    )


def _median_bits(values: Floats) -> Floats:
    """The median of log2 of each column of float64[T, C]; NaN in columns without a positive value."""
    bits = np.full(values.shape[1], np.nan)
    for column in range(values.shape[1]):
        positive = values[:, column][values[:, column] > 0]
        if len(positive):
            bits[column] = float(np.median(np.log2(positive[np.isfinite(positive)])))
    return bits


def gradient_norms(run: Run, baseline: Run | None) -> GradientNorms:
    """The gradient norms of both arms. Empty without both."""
    if baseline is None:
        return GradientNorms(np.zeros(0, np.int64), np.zeros(0))
    ours, theirs = (
        queries.scalar(member.id, "grad_norm", points=MAX_CURVE_POINTS, timed=False)
        for member in (run, baseline)
    )
    steps, here, there = np.intersect1d(ours.steps, theirs.steps, return_indices=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.log2(ours.values[here]) - np.log2(theirs.values[there])
    finite = np.isfinite(bits)
    return GradientNorms(steps[finite], bits[finite])


def tensors_of(run: Run) -> list[CataloguedTensor]:
    """The tensors of linear layers, in the order of the run's catalogue."""
    stored = Tensor.objects.filter(run=run, role__in=("input", "weight", "grad_output")).order_by("index")
    return [
        CataloguedTensor(
            index=row.index,
            name=row.name,
            module=row.module,
            role=row.role,
            largest=LARGEST.get(row.format.lower(), np.nan),
            numel=row.numel,
        )
        for row in stored[:MAX_TENSORS]
    ]


def steps_to_read(run: Run, tensors: int, around: Sequence[int]) -> tuple[int, int] | None:
    """The steps of which every row is read: all of a short run, else those around the first trouble.

    Args:
        around: steps at which something happens, the most important first; the end if there are none.
    """
    stored = queries.step_range(run.id)
    if stored is None or not tensors:
        return None
    width = int(np.clip(MAX_CELLS // tensors, MIN_STEPS, MAX_STEPS))
    first, last = stored
    if last - first < width:
        return first, last
    centre = around[0] if around else last
    begin = int(np.clip(centre - width // 2, first, last - width + 1))
    return begin, begin + width - 1


def tensor_rows(
    run: Run, tensors: Sequence[CataloguedTensor], between: tuple[int, int]
) -> TensorSeries | None:
    """All rows of these tensors in these steps; None if nothing is stored."""
    recorded = set(Run.objects.values_list("statistics", flat=True).get(pk=run.pk))
    names = [name for name in (*COUNTS, *ERRORS) if name in recorded]
    if "amax" not in recorded:
        return None
    merged = queries.unmerged_rows(run.id, names, [tensor.index for tensor in tensors], *between)
    if merged is None or not len(merged.steps):
        return None
    blank = np.full((len(tensors), len(merged.steps)), np.nan)
    values: dict[str, Floats] = {name: merged.values.get(name, blank) for name in (*COUNTS, *ERRORS)}
    stored = queries.step_range(run.id)
    error, signal = values.pop("sq_error"), values.pop("sq_signal")
    return TensorSeries(
        tensors=tuple(tensors),
        steps=merged.steps,
        error=np.divide(error, signal, out=blank.copy(), where=signal > 0),
        begins=stored is not None and int(merged.steps[0]) <= stored[0],
        **values,
    )


def resumes_of(run: Run) -> list[int]:
    """The first step of each later attempt, newest first."""
    rows = Writer.objects.filter(run=run, attempt__gt=0, first_step__isnull=False)
    return sorted(
        {step for step in rows.values_list("first_step", flat=True) if step is not None}, reverse=True
    )


def ranking_of(run: Run) -> ProductRanking | None:
    """The latest bisection."""
    report = run.reports.filter(kind="bisect").order_by("-step", "-id").first()
    return ProductRanking.of(report.step, report.document) if report is not None else None


def windows_of(run: Run) -> list[JudgedWindow]:
    """The latest reference windows, by step."""
    reports = run.reports.filter(kind="reference").order_by("-step", "-id")[:MAX_WINDOWS]
    return [
        JudgedWindow(report.step, report.step + len(report.document["bf16"]) - 1, report.document["verdict"])
        for report in reversed(reports)
    ]


def scores_of(runs: Sequence[Run], verdicts_of: Run | None = None) -> list[Scored]:
    """The evaluations of these runs by step, without their items; with the verdicts on one of them."""
    fields = ("name", "metric", "step", "precision")
    rows = Evaluation.scores.filter(run__in=runs).order_by("step", "id").values_list(*fields)
    verdicts: Mapping[tuple[str, str, int], Any] = {}
    if verdicts_of is not None:
        compared = EvaluationComparison.objects.filter(run=verdicts_of)
        verdicts = {
            (name, metric, step): verdict
            for name, metric, step, verdict in compared.values_list("name", "metric", "step", "verdict")
        }
    return [
        Scored(name, metric, step, precision or "", str(verdicts.get((name, metric, step), "")))
        for name, metric, step, precision in rows[:MAX_SCORES]
    ]


def environments_of(run: Run) -> list[Mapping[str, Any]]:
    """The recorded environment of the run."""
    return [run.environment] if run.environment else []
