"""The delta of the training loss between FP8 and BF16, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis import autocorrelated_noise
from fp8scope_dashboard.analysis.alignment import Aligned, Axis, Curve, align, clean
from fp8scope_dashboard.analysis.equivalence import judge_single, two_one_sided_tests
from fp8scope_dashboard.text import verdicts
from fp8scope_dashboard.text.numbers import SMALLEST, usable

Floats = NDArray[np.float64]
Verdict = Literal["equivalent", "different", "inconclusive", "within", "over", "insufficient"]

# The final window: late enough that the learning rate is at its lowest and the loss nearly level, so that its
# mean is meaningful; long enough to average out the noise of the batches.
WINDOW_FRACTION = 0.1
# With fewer aligned points there is no verdict; the window holds at least WINDOW_POINTS of them.
COMMON_POINTS = 20
WINDOW_POINTS = 5
# A run takes part if it covers at least this much of the compared range. Otherwise a run that has just
# started (or died early) would move the window of all runs back to its own start.
REACH = 1.0 - WINDOW_FRACTION
CURVE_POINTS = 400
# The usual distance between points is measured on this many points at the end.
CADENCE_POINTS = 20


@dataclass(frozen=True)
class Basis:
    """The runs and the range that a comparison uses.

    Attributes:
        end: the last compared point, on `aligned_on`; `gap` is the usual distance between points there.
        step: the first run's step at that point; `step_gap` is the usual distance between its last steps.
        runs: indices of the runs that took part, in the sequence given to `compare_losses`.
        baselines: indices of the baseline runs that took part.
    """

    end: float
    gap: float
    step: int
    step_gap: float
    runs: tuple[int, ...]
    baselines: tuple[int, ...]


@dataclass(frozen=True)
class LossComparison:
    """The verdict on a run's loss and the data that a page needs to show it. Relative figures are fractions.

    Attributes:
        delta: relative difference in the window; None if a run diverged or there is too little data.
        interval: between-seed interval of delta (two or more runs in each arm), else None.
        noise_interval: within-pair noise of delta, from the serial correlation of this pair alone.
        tolerance: the largest delta that counts as no difference: the margin, or the spread of the baseline.
        window: first and last point of the window, on `aligned_on`.
        curve: {"x", "delta", "low", "high"}: the first run's smoothed relative difference and its within-pair
            noise band, at most CURVE_POINTS values each; "x_name" names x.
        basis: the runs and the range that were compared; None with too little data.
    """

    verdict: Verdict
    explanation: str
    method: str = ""
    margin: float = 0.0
    tolerance: float | None = None
    delta: float | None = None
    interval: tuple[float, float] | None = None
    noise_interval: tuple[float, float] | None = None
    p_value: float | None = None
    k_run: int = 0
    k_baseline: int = 0
    aligned_on: Axis = "steps"
    paired: bool = True
    window: tuple[float, float] | None = None
    loss: float | None = None
    baseline_loss: float | None = None
    curve: dict[str, Any] = field(default_factory=dict)
    basis: Basis | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields but the basis, as JSON types; every number is finite."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(replace(self, basis=None)).items()
            if key != "basis"
        }


def compare_losses(
    runs: Sequence[Curve],
    baselines: Sequence[Curve],
    *,
    margin: float,
    alpha: float,
    window_fraction: float = WINDOW_FRACTION,
) -> LossComparison:
    """Compare an arm of runs that differ only in their seed with a baseline arm.

    Args:
        runs: the run to judge first, then others of its seed group.
        baselines: the runs of the baseline group.
        margin: relative difference that counts as none, > 0.
        alpha: size of the tests, 0 < alpha <= 0.5.
        window_fraction: part of the common range, at its end, whose mean loss is compared.

    If a loss is NaN or infinite in the window, the verdict is 'over' (one run) or 'different' (several).
    Baseline runs with such a loss are left out.

    Raises:
        ValueError: no run was given.
    """
    if not runs:
        raise ValueError("Nothing to compare: give at least one run.")
    runs = [clean(curve) for curve in runs]
    baselines = [clean(curve) for curve in baselines]
    logged = sum(1 for curve in baselines if len(curve))
    nothing = LossComparison("insufficient", "", margin=margin, k_run=1, k_baseline=logged)
    if not logged:
        return replace(nothing, explanation="The baseline group has no run with a loss yet.")
    if not len(runs[0]):
        return replace(nothing, explanation="The run has not logged a loss yet.")
    chosen, references = _reaching(runs, baselines)
    aligned = align([*(runs[i] for i in chosen), *(baselines[i] for i in references)])
    if len(aligned.x) < COMMON_POINTS:
        return replace(nothing, explanation=verdicts.too_few_points(len(aligned.x), COMMON_POINTS))
    window = _window(aligned.x, window_fraction)
    ours, theirs = aligned.losses[: len(chosen)], aligned.losses[len(chosen) :]
    sound = np.isfinite(theirs[:, window]).all(axis=1)
    if not sound.any():
        return replace(
            nothing,
            explanation="The loss of every baseline run is NaN or infinite in the last compared window.",
        )
    theirs = theirs[sound]
    common = replace(
        nothing,
        k_run=len(chosen),
        k_baseline=len(theirs),
        aligned_on=aligned.axis,
        paired=aligned.paired,
        window=(float(aligned.x[window][0]), float(aligned.x[-1])),
        baseline_loss=float(theirs[:, window].mean()),
        curve=_curve(aligned, ours[0], theirs, alpha),
        basis=_basis(runs[0], aligned, chosen, [references[i] for i in np.flatnonzero(sound)]),
    )
    return _judge(common, ours, theirs, window, aligned, alpha)


def _reaching(runs: Sequence[Curve], baselines: Sequence[Curve]) -> tuple[list[int], list[int]]:
    """Indices of the runs that reach (nearly) as far as both the first run and the furthest baseline.

    A run that ended early on a loss that is not finite stays in: it did not end by chance.
    """
    everyone = [*runs, *(curve for curve in baselines if len(curve))]
    tokens = all(curve.tokens is not None for curve in everyone)

    def end(curve: Curve) -> float:
        return float(curve.on("tokens" if tokens else "steps")[-1]) if len(curve) else 0.0

    horizon = REACH * min(end(runs[0]), max(map(end, baselines)))
    chosen = [0]
    for index, curve in enumerate(runs[1:], 1):
        if len(curve) and (end(curve) >= horizon or not np.isfinite(curve.losses[-1])):
            chosen.append(index)
    return chosen, [i for i, curve in enumerate(baselines) if len(curve) and end(curve) >= horizon]


def _basis(run: Curve, aligned: Aligned, chosen: Sequence[int], references: Sequence[int]) -> Basis:
    last = aligned.x[-CADENCE_POINTS:]
    at = np.searchsorted(run.on(aligned.axis), last, side="right") - 1
    steps = run.steps[at.clip(min=0)]
    return Basis(
        end=float(last[-1]),
        gap=float(np.median(np.diff(last))),
        step=int(steps[-1]),
        step_gap=max(1.0, float(np.median(np.diff(steps)))),
        runs=tuple(chosen),
        baselines=tuple(references),
    )


def _window(x: Floats, fraction: float) -> slice:
    first = int(np.searchsorted(x, x[-1] - fraction * (x[-1] - x[0])))
    return slice(min(first, len(x) - WINDOW_POINTS), None)


def _judge(
    common: LossComparison, ours: Floats, theirs: Floats, window: slice, aligned: Aligned, alpha: float
) -> LossComparison:
    broken = np.logical_not(np.isfinite(ours[:, window]).all(axis=1))
    if broken.any():
        return _diverged(common, ours, broken, aligned)
    means, references = ours[:, window].mean(axis=1), theirs[:, window].mean(axis=1)
    reference = float(references.mean())
    if abs(reference) < SMALLEST:
        return replace(
            common,
            explanation="The baseline's loss is 0 in the last compared window: no relative difference.",
        )
    pointwise = (ours[0, window] - theirs[:, window].mean(axis=0)) / abs(reference)
    common = replace(
        common, loss=float(means.mean()), noise_interval=autocorrelated_noise.hac_interval(pointwise, alpha)
    )
    if len(means) >= 2 and len(references) >= 2:
        test = two_one_sided_tests(means, references, common.margin, alpha)
        judged = replace(
            common,
            verdict=test.verdict,
            method="two one-sided Welch t-tests over seeds",
            tolerance=common.margin,
            delta=test.delta,
            interval=test.interval,
            p_value=test.p_value,
        )
        explanation = verdicts.loss_over_seeds(
            test.verdict,
            test.delta,
            test.interval,
            level=1.0 - 2.0 * alpha,
            margin=common.margin,
            runs=len(means),
            baseline_loss=reference,
            seeds=len(references),
        )
        return replace(judged, explanation=explanation)
    loss = float(means.mean())
    verdict, delta, allowed = judge_single(loss, references, common.margin)
    return replace(
        common,
        verdict=verdict,
        method=(
            "tolerance equal to the margin"
            if allowed == common.margin
            else "tolerance from the baseline's seeds"
        ),
        tolerance=allowed,
        delta=delta,
        explanation=verdicts.loss_of_one_run(
            loss, delta, reference, len(references), tolerance=allowed, margin=common.margin
        ),
    )


def _diverged(
    common: LossComparison, ours: Floats, broken: NDArray[np.bool_], aligned: Aligned
) -> LossComparison:
    first_broken = int(np.argmax(broken))
    since = float(aligned.x[_broken_since(ours[first_broken])])
    return replace(
        common,
        verdict="over" if len(ours) == 1 else "different",
        method="loss not finite",
        tolerance=common.margin,
        explanation=verdicts.diverged(since, aligned.axis, int(broken.sum()), len(ours)),
    )


def _broken_since(losses: Floats) -> int:
    """Index from which the loss is not finite to the end; the last such index if it recovered."""
    finite = np.flatnonzero(np.isfinite(losses))
    if len(finite) == 0 or finite[-1] < len(losses) - 1:
        return int(finite[-1]) + 1 if len(finite) else 0
    return int(np.flatnonzero(~np.isfinite(losses))[-1])


def _curve(aligned: Aligned, ours: Floats, theirs: Floats, alpha: float) -> dict[str, Any]:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        reference = theirs.mean(axis=0)
        relative = (ours - reference) / np.abs(reference)
    finite = usable(relative)
    x, relative = aligned.x[finite], relative[finite]
    mean, low, high = autocorrelated_noise.moving_band(relative, max(5, len(x) // 20), alpha)
    kept = np.unique(np.linspace(0, len(x) - 1, min(CURVE_POINTS, len(x))).astype(np.int64))
    return {
        "x_name": aligned.axis,
        "x": x[kept].tolist(),
        "delta": mean[kept].tolist(),
        "low": low[kept].tolist(),
        "high": high[kept].tolist(),
    }
