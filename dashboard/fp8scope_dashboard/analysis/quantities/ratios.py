"""Throughput, memory and gradient norm of an arm relative to its baseline. Pure functions of arrays.

Every ratio is a difference of logarithms, so that A / B and B / A have the same interval, inverted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.quantities import arms, serial
from fp8scope_dashboard.analysis.quantities.arms import Source
from fp8scope_dashboard.analysis.quantities.measured import MeasuredRun, MeasuredScalar
from fp8scope_dashboard.analysis.quantities.serial import Estimate
from fp8scope_dashboard.analysis.quantities.window import last_window
from fp8scope_dashboard.statistics.arrays import Floats

Rows = TypeVar("Rows", NDArray[np.float64], NDArray[np.int64])

# The first rows of a run: compilation, autotuning, caches. At most a fifth of a short run is left out.
WARM_UP_ROWS: Final = 20
WARM_UP_SHARE: Final = 0.2
MIN_ROWS: Final = 15
GRADIENT_SHARE: Final = 1.0 / 3.0
GRADIENT_WIDEST: Final = 0.8


@dataclass(frozen=True)
class BaselineRatio:
    """A ratio to the baseline.

    Attributes:
        name: of the scalar that it was computed from.
        value: None if a run of either arm logs too little.
        interval: None without `value`, and if the scalar did not vary at all.
        source: whether the error comes from the spread between runs, or from the noise within them.
        points: rows (or bins) of the run with the fewest.
    """

    name: str
    value: float | None = None
    interval: tuple[float, float] | None = None
    source: Source = "within"
    points: int = 0


def throughput(
    ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun], *, level: float = 0.95
) -> BaselineRatio:
    """Tokens per second relative to the baseline's, or steps per second if the tokens of a step are unknown.

    Of each run the typical rate counts: the mean of the logarithms of medians over groups of rows. Pauses for
    evaluations, checkpoints and sampled statistics do not count, nor does the beginning.
    """
    tokens = _typical_ratio("tokens_per_second", ours, theirs, level)
    if tokens.value is not None:
        return tokens
    steps = _typical_ratio("step_seconds", ours, theirs, level)
    if steps.value is None:
        return BaselineRatio("tokens_per_second")
    sizes = [[_tokens_per_step(run) for run in arm] for arm in (ours, theirs)]
    mine, other = ([run for run in arm if run is not None] for arm in sizes)
    is_complete = len(mine) == len(ours) and len(other) == len(theirs)
    size = float(np.mean(mine) / np.mean(other)) if is_complete else 1.0
    interval = None if steps.interval is None else (size / steps.interval[1], size / steps.interval[0])
    name = "tokens_per_second" if is_complete else "steps_per_second"
    return BaselineRatio(name, size / steps.value, interval, steps.source, steps.points)


def mean_time(ours: MeasuredRun, theirs: MeasuredRun, *, level: float = 0.95) -> BaselineRatio:
    """The mean time of a step relative to that of another run; of a token, if both runs log tokens.

    Unlike `throughput`, pauses count: a checkpoint, or a loader whose workers deliver now and then.
    """
    means = [_mean(run, "step_seconds") for run in (ours, theirs)]
    if means[0] is None or means[1] is None:
        return BaselineRatio("step_seconds")
    rows = min(len(run.scalars["step_seconds"]) for run in (ours, theirs))
    steps = _ratio("step_seconds", [means[0]], [means[1]], level, points=rows)
    sizes = [_tokens_per_step(run) for run in (ours, theirs)]
    if steps.value is None or not sizes[0] or not sizes[1]:
        return steps
    factor = sizes[1] / sizes[0]
    interval = None if steps.interval is None else (factor * steps.interval[0], factor * steps.interval[1])
    return BaselineRatio("token_seconds", factor * steps.value, interval, steps.source, steps.points)


def memory(
    ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun], *, level: float = 0.95
) -> BaselineRatio:
    """The peak of the GPU memory in use relative to the baseline's; the reserved memory if that is missing.

    The peak is that of the whole run so far. It rarely varies, so an interval needs several runs.
    """
    for name in ("memory_peak", "memory_reserved"):
        peaks = [[_peak(run, name) for run in arm] for arm in (ours, theirs)]
        measured_peaks = [[peak for peak in arm if peak is not None] for arm in peaks]
        if measured_peaks[0] and measured_peaks[1] and peaks[0][0] is not None:
            return _ratio(
                name, measured_peaks[0], measured_peaks[1], level, points=len(ours[0].scalars[name])
            )
    return BaselineRatio("memory_peak")


def energy(
    ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun], *, level: float = 0.95
) -> BaselineRatio:
    """Energy per token relative to the baseline's in typical steps, `gpu_power_watts` / `tokens_per_second`.

    Power is sampled once a second, so a sample stands for the steps around it. It is that of one process's
    GPU, and the tokens are those that the script logs: the ratio has a meaning for runs of as many ranks.
    """
    per_token = [[_energy_per_token(run) for run in arm] for arm in (ours, theirs)]
    sides = [[line for line in arm if len(line) >= MIN_ROWS] for arm in per_token]
    if not sides[0] or not sides[1] or len(per_token[0][0]) < MIN_ROWS:
        return BaselineRatio("gpu_power_watts")
    estimates = [[serial.mean(serial.group_medians(np.log(line.values))) for line in arm] for arm in sides]
    points = min(len(line) for arm in sides for line in arm)
    return _ratio("gpu_power_watts", estimates[0], estimates[1], level, points=points)


def _energy_per_token(run: MeasuredRun) -> MeasuredScalar:
    """Joules per token at the samples of the power after the warm-up; empty without both scalars."""
    power, rate = _positive(run, "gpu_power_watts"), _positive(run, "tokens_per_second")
    if not len(power) or len(rate) < MIN_ROWS:
        return MeasuredScalar(np.zeros(0, np.int64), np.zeros(0))
    begin = after_warm_up(rate.steps)[0]
    inside = (power.steps >= begin) & (power.steps <= rate.steps[-1])
    steps = power.steps[inside]
    rates = np.interp(steps, rate.steps, rate.values)
    return MeasuredScalar(steps, power.values[inside] / rates)


def gradient_norm(
    ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun], *, level: float = 0.95
) -> BaselineRatio:
    """The norm of the gradients relative to the baseline's: geometric means over the last third of the range.

    Where the runs log the same steps on the same data, the noise of the batches cancels.
    """
    lines = [[_positive(run, "grad_norm") for run in arm] for arm in (ours, theirs)]
    long_lines = [[line for line in arm if len(line) >= MIN_ROWS] for arm in lines]
    if not long_lines[0] or not long_lines[1] or len(lines[0][0]) < MIN_ROWS:
        return BaselineRatio("grad_norm")
    curves = [
        (line.steps.astype(np.float64), np.log(line.values)) for line in (*long_lines[0], *long_lines[1])
    ]
    window = last_window(curves, GRADIENT_SHARE, widest=GRADIENT_WIDEST)
    if window is None:
        return BaselineRatio("grad_norm")
    first, second = window.values[: len(long_lines[0])], window.values[len(long_lines[0]) :]
    if arms.source_of(len(first), len(second)) == "within":
        x = window.x - window.x.mean()
        design = np.stack([np.ones_like(x), x / np.abs(x).max()], axis=1)
        estimate = serial.fit(design, first.mean(axis=0) - second.mean(axis=0)).coefficient(0)
        return _of_logarithm("grad_norm", estimate, "within", level, len(window))
    means = [[Estimate(float(row.mean()), 0.0, 1.0) for row in arm] for arm in (first, second)]
    between = arms.difference(*means)
    return _of_logarithm("grad_norm", between.estimate, between.source, level, len(window))


def _typical_ratio(
    name: str, ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun], level: float
) -> BaselineRatio:
    typical = [[_typical(run, name) for run in arm] for arm in (ours, theirs)]
    medians = [[median for median in arm if median is not None] for arm in typical]
    if not medians[0] or not medians[1] or typical[0][0] is None:
        return BaselineRatio(name)
    rows = min(len(run.scalars[name]) for run in (*ours, *theirs) if name in run.scalars)
    return _ratio(name, medians[0], medians[1], level, points=rows)


def _typical(run: MeasuredRun, name: str) -> Estimate | None:
    """The logarithm of the typical value after the warm-up; None with fewer than MIN_ROWS rows."""
    line = _positive(run, name)
    values = np.log(after_warm_up(line.values))
    return None if len(values) < MIN_ROWS else serial.mean(serial.group_medians(values))


def _mean(run: MeasuredRun, name: str) -> Estimate | None:
    """The logarithm of the mean after the warm-up; None with fewer than MIN_ROWS rows."""
    values = _positive(run, name).values
    return None if len(after_warm_up(values)) < MIN_ROWS else log_mean(values)


def after_warm_up(rows: Rows) -> Rows:
    """Leave out the first rows: they are slower, or are not yet those of the training."""
    return rows[min(WARM_UP_ROWS, int(WARM_UP_SHARE * len(rows))) :]


def log_mean(values: Floats) -> Estimate:
    """Estimate the logarithm of the mean of positive values after the warm-up, which are at least three.

    By the delta method its variance is the relative variance of the mean.
    """
    mean = serial.mean(serial.group_means(after_warm_up(values)))
    return Estimate(float(np.log(mean.value)), mean.variance / mean.value**2, mean.dof)


def _tokens_per_step(run: MeasuredRun) -> float | None:
    """The mean number of tokens of a step; None if the run does not log tokens."""
    steps, tokens = run.loss.steps, run.tokens
    if tokens is None or len(steps) < 2 or tokens[-1] <= tokens[0]:
        return None
    return float((tokens[-1] - tokens[0]) / (steps[-1] - steps[0]))


def _peak(run: MeasuredRun, name: str) -> Estimate | None:
    values = _positive(run, name).values
    return Estimate(float(np.log(values.max())), 0.0, 1.0) if len(values) else None


def _positive(run: MeasuredRun, name: str) -> MeasuredScalar:
    """The points of a scalar with a logarithm; empty if the run does not log it."""
    line = run.scalars.get(name)
    if line is None:
        return MeasuredScalar(np.zeros(0, np.int64), np.zeros(0))
    with np.errstate(invalid="ignore"):
        positive = np.isfinite(line.values) & (line.values > 0.0)
    return MeasuredScalar(line.steps[positive], line.values[positive])


def _ratio(
    name: str, ours: Sequence[Estimate], theirs: Sequence[Estimate], level: float, points: int
) -> BaselineRatio:
    between = arms.difference(ours, theirs)
    return _of_logarithm(name, between.estimate, between.source, level, points)


def _of_logarithm(name: str, estimate: Estimate, source: Source, level: float, points: int) -> BaselineRatio:
    low, high = estimate.interval(level)
    # Logarithms of constant values may differ in the last bit.
    varies = estimate.variance > 1e-24
    interval = (float(np.exp(low)), float(np.exp(high))) if varies else None
    return BaselineRatio(name, float(np.exp(estimate.value)), interval, source, points)
