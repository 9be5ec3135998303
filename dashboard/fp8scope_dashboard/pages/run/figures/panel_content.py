"""Read what the panels of a run show: loss, delta, tensors out of range, gradient norm, learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.arms import Arms, arms_of
from fp8scope_dashboard.pages.charts.curves import Curve
from fp8scope_dashboard.pages.charts.ranges import PADDING, Range, central_range, loss_range
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.charts.smoothing import centred_average, default_span
from fp8scope_dashboard.pages.charts.theme import Slot
from fp8scope_dashboard.pages.formatting import difference, percent
from fp8scope_dashboard.pages.run.figures.panels import Band, FigurePanel, PlainLine, ShownInterval
from fp8scope_dashboard.pages.run.onset_facts import steps_at
from fp8scope_dashboard.pages.tensors.range_counts import OVERFLOW, UNDERFLOW, read_counts
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries

# Baseline seeds in the band: the newest.
MAX_SEEDS: Final = 8
# Buckets of steps whose means are the smooth lines, at most twice as many.
BUCKETS: Final = 256
COLUMNS, COMPACT_COLUMNS = 240, 100
# The delta's panel shows this many tolerances, and more only if the last looks need them.
MIN_TOLERANCES, MAX_TOLERANCES = 1.8, 40.0
# A norm that spans more than this factor is drawn on a log axis.
LOG_FROM: Final = 30.0
# Scalars that have a panel of their own, or that are an axis.
STANDARD: Final = ("loss", "grad_norm", "learning_rate", "tokens")
# Panels of other scalars in a run without a loss.
MAX_FURTHER: Final = 6
# The least end of an axis that counts tensors.
MIN_COUNTED: Final = 4.0
# Of a panel without a finite value: the marks of those that are not finite need a place.
BLANK_RANGE: Final[Range] = (0.0, 1.0)


@dataclass(frozen=True)
class Smooth:
    """Smoothed means of a scalar over steps of the shown run, float64[B] each."""

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class Loaded:
    """The panels, a sentence about each for screen readers, and the steps that they span."""

    panels: list[FigurePanel]
    sentences: list[str]
    x_range: Range | None = None


def load_panels(run: Run, options: Options, also: str = "") -> Loaded:
    """The panels of a run that have data. `also`: one more scalar to show."""
    arms = arms_of(run.project)
    result = _result(run)
    on_tokens = result.get("aligned_on") == "tokens"
    baselines = comparison_runs.baseline_runs(run)[-MAX_SEEDS:]
    window = _window(run, baselines, options)
    names = ("loss", "grad_norm")
    own = _smoothed(run.id, names, window)
    seeds = {baseline.id: _smoothed(baseline.id, names, window) for baseline in baselines}
    if on_tokens:
        seeds = {seed_run: _on_own_steps(read, own) for seed_run, read in seeds.items()}
    panels: list[FigurePanel] = []
    sentences: list[str] = []

    def add(made: tuple[FigurePanel, str] | None) -> None:
        if made is not None:
            panels.append(made[0])
            sentences.append(made[1])

    bands = {name: _band(run, arms, baselines, [read[name] for read in seeds.values()]) for name in names}
    add(_loss(run, arms, options, own["loss"], bands["loss"]))
    add(_delta(run, arms, result, own["loss"], bands["loss"], options))
    add(_out_of_range(run, options))
    add(_scalar(run, arms, options, "grad_norm", bands["grad_norm"], 90))
    add(_learning_rate(run, options))
    for name in _further(run, also):
        add(_scalar(run, arms, options, name, None, 90))
    return Loaded(panels, sentences, _span(panels))


def _further(run: Run, also: str) -> list[str]:
    """The scalar that was asked for; of a run without a loss also its other scalars, its own names first."""
    logged = [name for name in sorted(run.last_scalars) if name not in STANDARD]
    chosen = [also] if also in logged else []
    if "loss" not in run.last_scalars:
        own_first = sorted(logged, key=lambda name: name in glossary.GLOSSARY)
        chosen += [name for name in own_first if name not in chosen][:MAX_FURTHER]
    return chosen


@dataclass(frozen=True)
class _Window:
    first: int | None
    last: int | None
    stride: int


def _window(run: Run, baselines: Sequence[Run], options: Options) -> _Window:
    """The steps to read, and the power of two of steps in a bucket."""
    ends = [member.last_step for member in (run, *baselines) if member.last_step is not None]
    last = max(ends, default=0) if options.last is None else options.last
    first = options.first or 0
    stride = 1 << max(0, ((last - first + 1) // BUCKETS).bit_length() - 1) if last >= first else 1
    return _Window(None if options.first is None else max(0, first) // stride * stride, options.last, stride)


def _smoothed(run_id: UUID, names: Sequence[str], window: _Window) -> dict[str, Smooth]:
    """Smoothed scalars of one run, and its tokens, which are not smoothed."""
    strides = dict.fromkeys((*names, "tokens"), window.stride)
    read = queries.scalar_means(run_id, strides, first=window.first, last=window.last)
    smooth = {}
    for name, means in read.items():
        values = means.last if name == "tokens" else centred_average(means.means, default_span(len(means)))
        # A mean stands in the middle of its bucket, a sum of tokens at its end.
        middle = (means.counts.clip(max=window.stride) - 1) / 2.0 if name != "tokens" else 0.0
        smooth[name] = Smooth(np.asarray(means.ends - middle, np.float64), values)
    return smooth


def _on_own_steps(read: dict[str, Smooth], own: dict[str, Smooth]) -> dict[str, Smooth]:
    """The scalars of a baseline at the steps at which the run has seen as many tokens."""
    theirs, ours = read["tokens"], own["tokens"]
    if not len(theirs.steps) or not len(ours.steps):
        return read
    moved = {}
    for name, smooth in read.items():
        tokens = np.interp(smooth.steps, theirs.steps, theirs.values)
        inside = (tokens >= ours.values[0]) & (tokens <= ours.values[-1])
        steps = np.interp(tokens[inside], ours.values, ours.steps)
        moved[name] = Smooth(steps, smooth.values[inside])
    return moved


def _band(run: Run, arms: Arms, baselines: Sequence[Run], read: Sequence[Smooth]) -> Band | None:
    """The mean and the range of the baseline's seeds; None if none has a value."""
    with_losses = [
        (baseline, smooth) for baseline, smooth in zip(baselines, read, strict=True) if len(smooth.steps)
    ]
    if not with_losses:
        return None
    x = np.unique(np.concatenate([smooth.steps for _, smooth in with_losses]))
    values = np.array(
        [np.interp(x, smooth.steps, smooth.values, left=np.nan, right=np.nan) for _, smooth in with_losses]
    )
    seen = np.isfinite(values).any(axis=0)
    x, values = x[seen], np.where(np.isfinite(values), values, np.nan)[:, seen]
    if not len(x):
        return None
    label = comparison_runs.baseline_label(run)
    name = f"{label} ({len(with_losses)} seeds)" if len(with_losses) > 1 else label
    slot: Slot = arms.of(with_losses[0][0]).slot
    return Band(
        name=name,
        slot=slot,
        x=x,
        mean=np.nanmean(values, axis=0),
        low=np.nanmin(values, axis=0),
        high=np.nanmax(values, axis=0),
    )


def _span(panels: Sequence[FigurePanel]) -> Range | None:
    """The first and the last step of the run's own curves; with one step, those of the baseline as well.

    They are equal if there is no other step.
    """
    own = [curve.x for panel in panels for curve in panel.curves]
    baselines = [band.x for panel in panels for band in panel.bands if len(band.x)]
    for shown in (own, [*own, *baselines]):
        ends = [(float(x[0]), float(x[-1])) for x in shown]
        first, last = min((end[0] for end in ends), default=0.0), max((end[1] for end in ends), default=0.0)
        if last > first:
            return first, last
    return (first, last) if own else None


def _loss(
    run: Run, arms: Arms, options: Options, smooth: Smooth, band: Band | None
) -> tuple[FigurePanel, str] | None:
    curve = _curve(run, arms, options, "loss", smooth)
    if curve is None:
        return None
    seen = [curve.y, *([band.low, band.high] if band is not None else [])]
    y_range = _extent(seen) if options.zoomed else loss_range(seen)
    log = options.log
    if log:
        y_range = _positive_extent(seen)
        log = y_range is not None
    panel = FigurePanel(
        title="loss",
        height=190 if options.compact else 230,
        y_range=y_range or BLANK_RANGE,
        curves=(curve,),
        bands=(band,) if band is not None else (),
        log=log,
        is_blank=y_range is None,
    )
    finite = curve.y[np.isfinite(curve.y)]
    broken = len(curve.y) - len(finite)
    last = (
        f"Loss of {run.name}: {finite[-1]:.4g} at the last step shown." if len(finite) else "No finite loss."
    )
    note = f" {broken} of the points shown are not finite." if broken else ""
    return panel, last + note


def _series(run: Run, options: Options, name: str) -> queries.Series | None:
    """The points of a scalar; None without any. A scalar that was never logged is not searched."""
    if name not in run.last_scalars:
        return None
    series = queries.scalar(
        run.id, name, first=options.first, last=options.last, points=options.points, timed=False
    )
    return series if len(series) else None


def _curve(run: Run, arms: Arms, options: Options, name: str, smooth: Smooth | None) -> Curve | None:
    series = _series(run, options, name)
    if series is None:
        return None
    smooth_x = smooth_y = np.zeros(0)
    if smooth is not None and options.smooth and default_span(len(smooth.steps)) > 1:
        smooth_x, smooth_y = smooth.steps, smooth.values
    return Curve(
        name=run.name,
        arm="",
        slot=arms.of(run).slot,
        x=series.steps.astype(np.float64),
        y=series.values,
        smooth_x=smooth_x,
        smooth_y=smooth_y,
    )


def _delta(
    run: Run, arms: Arms, result: dict[str, Any], own: Smooth, band: Band | None, options: Options
) -> tuple[FigurePanel, str] | None:
    """The comparison's difference with its interval, and the smoothed difference at each step."""
    curve = result.get("curve") or {}
    tolerance = result.get("tolerance") or result.get("margin")
    if not tolerance or (not curve.get("x") and band is None):
        return None
    nats = result.get("unit") == "nats"
    unit = "+.3~g" if nats else ".2~%"
    interval = _interval(run, arms, curve, options) if curve.get("x") else None
    fine = _fine_difference(own, band, nats)
    if interval is None and fine is None:
        return None
    judged = [interval.middle] if interval is not None else [fine.y] if fine is not None else []
    panel = FigurePanel(
        title="difference to the baseline (FP8 − BF16)" if nats else "difference to the baseline",
        height=110,
        y_range=_delta_range(judged, float(tolerance)),
        lines=(fine,) if fine is not None else (),
        interval=interval,
        zone=(-float(tolerance), float(tolerance)),
        tick_format=unit,
    )
    delta, name = result.get("delta"), "nats" if nats else "relative"
    shown = "not known" if delta is None else difference(delta, name, signed=True)
    size = difference(float(tolerance), name)
    return panel, f"Difference to the baseline: {shown}, tolerance {size}."


def _interval(run: Run, arms: Arms, curve: dict[str, Any], options: Options) -> ShownInterval | None:
    x, middle, low, high = (np.asarray(curve[key], np.float64) for key in ("x", "delta", "low", "high"))
    steps = steps_at(run, x, str(curve.get("x_name", "steps")))
    inside = np.ones(len(steps), bool)
    if options.first is not None:
        inside &= steps >= options.first
    if options.last is not None:
        inside &= steps <= options.last
    if inside.sum() < 2:
        return None
    return ShownInterval(
        name="difference, with its interval",
        slot=arms.of(run).slot,
        x=steps[inside],
        middle=middle[inside],
        low=low[inside],
        high=high[inside],
    )


def _fine_difference(own: Smooth, band: Band | None, nats: bool) -> PlainLine | None:
    if band is None or not len(own.steps):
        return None
    inside = (own.steps >= band.x[0]) & (own.steps <= band.x[-1])
    if band.x[-1] > own.steps[-1]:
        # Near its end the run is averaged over ever fewer steps, and the baseline, which goes on, is not.
        inside[len(inside) - default_span(len(inside)) // 2 :] = False
    x = own.steps[inside]
    if len(x) < 2:
        return None
    theirs = np.interp(x, band.x, band.mean)
    values = own.values[inside] - theirs
    if not nats:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = values / np.abs(theirs)
    return PlainLine(
        name="difference, smoothed", x=x, y=values, unit="+.3~g" if nats else "+.3~%", is_faint=True
    )


def _delta_range(values: Sequence[Floats], tolerance: float) -> Range:
    """Some tolerances on both sides of zero; more where the later half of the values needs them."""
    later = np.concatenate([value[len(value) // 2 :] for value in values]) if values else np.zeros(0)
    later = later[np.isfinite(later)]
    least, most = MIN_TOLERANCES * tolerance, MAX_TOLERANCES * tolerance
    low, high = (float(later.min()), float(later.max())) if len(later) else (0.0, 0.0)
    return -float(np.clip(-1.1 * low, least, most)), float(np.clip(1.1 * high, least, most))


def _out_of_range(run: Run, options: Options) -> tuple[FigurePanel, str] | None:
    columns = COMPACT_COLUMNS if options.compact else COLUMNS
    counts = read_counts(run, first=options.first, last=options.last, columns=columns)
    if counts is None or np.isnan(counts.either).all():
        return None
    limits = counts.limits
    edges = counts.edges.astype(np.float64)
    # Where no tensor is observed, the last count holds.
    observed = np.flatnonzero(~np.isnan(counts.either))
    # The last column reaches to the last step.
    x = edges[observed]
    is_wide = edges[-1] - 1.0 > x[-1]
    x = np.append(x, edges[-1] - 1.0) if is_wide else x

    def line(values: Floats, name: str, tone: str) -> PlainLine:
        drawn = np.append(values[observed], values[observed[-1]]) if is_wide else values[observed]
        return PlainLine(name=name, x=x, y=drawn, tone=tone, is_area=tone == "danger")

    overflow = line(counts.overflow, f"overflow ≥ {percent(limits[OVERFLOW])}", "danger")
    underflow = line(counts.underflow, f"underflow ≥ {percent(limits[UNDERFLOW])}", "warning")
    highest = int(np.nanmax(counts.either))
    panel = FigurePanel(
        title=f"tensors out of range, of {counts.observed:,}",
        height=80,
        # Counts, because a share would hide two of thousands; and no ticks between them.
        y_range=(0.0, max(MIN_COUNTED, 1.15 * highest)),
        lines=(overflow, underflow),
    )
    said = f"At most {highest:,} of {counts.observed:,} tensors overflow or underflow at the same time."
    return panel, said


def _scalar(
    run: Run, arms: Arms, options: Options, name: str, band: Band | None, height: int
) -> tuple[FigurePanel, str] | None:
    curve = _curve(run, arms, options, name, None)
    if curve is None:
        return None
    seen = [curve.y, *([band.low, band.high] if band is not None else [])]
    y_range = central_range(seen)
    log = y_range is not None and y_range[0] > 0 and y_range[1] / y_range[0] > LOG_FROM
    if not log and y_range is not None and y_range[0] <= 0:
        positive = _positive_extent(seen)
        # The range of a norm that falls by orders of magnitude is padded below zero.
        if name == "grad_norm" and positive is not None and positive[1] / positive[0] > LOG_FROM:
            y_range, log = positive, True
    title = glossary.title(name).lower()
    panel = FigurePanel(
        title=title,
        height=height,
        y_range=y_range or BLANK_RANGE,
        curves=(curve,),
        bands=(band,) if band is not None else (),
        log=log,
        is_blank=y_range is None,
    )
    finite = curve.y[np.isfinite(curve.y)]
    last = f"{finite[-1]:.4g} at the last step shown" if len(finite) else "not finite"
    return panel, f"{glossary.title(name)}: {last}."


def _learning_rate(run: Run, options: Options) -> tuple[FigurePanel, str] | None:
    series = _series(run, options, "learning_rate")
    if series is None:
        return None
    line = PlainLine(name="learning rate", x=series.steps.astype(np.float64), y=series.values, unit=".3~g")
    panel = FigurePanel(
        title="learning rate", height=56, y_range=_extent([series.values]), lines=(line,), tick_format=".2~g"
    )
    return panel, f"Learning rate: {series.values[-1]:.3g} at the last step shown."


def _extent(values: Sequence[Floats]) -> Range | None:
    pooled = np.concatenate([value[np.isfinite(value)] for value in values])
    if not len(pooled):
        return None
    low, high = float(pooled.min()), float(pooled.max())
    room = PADDING * ((high - low) or abs(high) or 1.0)
    return low - room, high + room


def _positive_extent(values: Sequence[Floats]) -> Range | None:
    """The extent of the values above zero for a log axis; None if there are none."""
    pooled = np.concatenate([value[np.isfinite(value)] for value in values])
    pooled = pooled[pooled > 0]
    if not len(pooled):
        return None
    low, high = float(pooled.min()), float(pooled.max())
    factor = max(high / low, 1.1) ** PADDING
    return low / factor, high * factor


def _result(run: Run) -> dict[str, Any]:
    comparison = getattr(run, "comparison", None)
    return dict(comparison.result) if comparison is not None else {}
