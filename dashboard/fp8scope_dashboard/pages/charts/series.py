"""Load stored series and prepare them as curves of a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, get_args
from uuid import UUID

import numpy as np
from django.http import QueryDict
from django.utils import timezone

from fp8scope_dashboard.pages.charts.arms import ArmReader, arm_labels
from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.marks import Mark
from fp8scope_dashboard.pages.charts.plain_figure import PlainFigure
from fp8scope_dashboard.pages.charts.ranges import loss_range
from fp8scope_dashboard.pages.charts.settled_series import thinned_scalars
from fp8scope_dashboard.pages.charts.smoothing import centred_average, default_span
from fp8scope_dashboard.pages.charts.step_places import StepPlaces
from fp8scope_dashboard.pages.charts.theme import Slot, Theme, theme_named
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.downsample import keep

Axis = Literal["step", "tokens", "time", "wall"]
AXIS_TITLES: Final[dict[Axis, str]] = {
    "step": "step",
    "tokens": "tokens seen",
    "time": "minutes since the first step",
    "wall": "time of day",
}
# Axes for which the times of the steps are read.
TIMED: Final[tuple[Axis, ...]] = ("time", "wall")

POINTS, COMPACT_POINTS = 1_200, 500
MAX_STEP = 2**62
# Scalars that are asked for the time of a run's first step; one that is logged in each step comes early.
MAX_ASKED: Final = 8
# Points of a whole series from which the steps of a range of tokens or of time are taken.
RANGE_POINTS = 4_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Validated options of a figure's address; invalid values become the defaults.

    Attributes:
        first, last: the range of steps.
        span: the range on the axis if this has other units than steps.
        marks: whether alerts, changes and notes of a run are marked.
    """

    theme: Theme
    compact: bool
    log: bool
    smooth: bool
    axis: Axis
    first: int | None
    last: int | None
    span: tuple[float, float] | None = None
    marks: bool = True

    @classmethod
    def of(cls, query: QueryDict) -> Options:
        """Read the options from the query."""
        name = query.get("x", "step")
        axis: Axis = name if name in get_args(Axis) else "step"  # type: ignore[assignment]
        return cls(
            theme=theme_named(query.get("theme", "")),
            compact=query.get("compact") == "1",
            log=query.get("log") == "1",
            smooth=query.get("smooth", "1") == "1",
            axis=axis,
            first=step_of(query.get("first")),
            last=step_of(query.get("last")),
            span=None if axis == "step" else _span_of(query.get("from", ""), query.get("to", "")),
            marks=query.get("marks", "1") == "1",
        )

    @property
    def points(self) -> int:
        return COMPACT_POINTS if self.compact else POINTS

    @property
    def zoomed(self) -> bool:
        return self.first is not None or self.last is not None or self.span is not None


def loss_figure(
    curves: Sequence[Curve],
    options: Options,
    *,
    y_title: str = "loss",
    height: int = 340,
    marks: Sequence[Mark] = (),
    picks_steps: bool = False,
) -> PlainFigure:
    """Draw curves of losses, or of any scalar of several runs, as the options ask.

    The whole of a chart has the range of usual values; a part that was chosen is shown as it is.
    """
    return curves_figure(
        curves,
        options.theme,
        y_range=None if options.zoomed else loss_range([curve.y for curve in curves]),
        log=options.log,
        compact=options.compact,
        height=height,
        x_title=AXIS_TITLES[options.axis],
        y_title=y_title,
        marks=marks,
        is_dated=options.axis == "wall",
        picks_steps=picks_steps,
    )


def loss_curves(
    runs: Sequence[Run],
    arms: ArmReader,
    options: Options,
    *,
    quiet: Iterable[UUID] = (),
    points: int | None = None,
) -> list[Curve]:
    """The losses of several runs. Runs in `quiet` are drawn first, in the background."""
    return scalar_curves(runs, "loss", arms, options, quiet=quiet, points=points)


def scalar_curves(
    runs: Sequence[Run],
    name: str,
    arms: ArmReader,
    options: Options,
    *,
    quiet: Iterable[UUID] = (),
    points: int | None = None,
) -> list[Curve]:
    """A scalar of several runs, downsampled for drawing; runs without it are left out.

    With `points`, each line is read with at most this many; otherwise all of it, to be smoothed.
    """
    background = set(quiet)
    labels = arm_labels(arms, runs)
    ordered = sorted(runs, key=lambda run: run.id not in background)
    parts = {run.id: part_of(run.id, name, options) for run in ordered}
    read = _read(ordered, parts, name, points, is_timed=options.axis in TIMED)
    curves = []
    for run in ordered:
        series = read[run.id]
        if len(series):
            x = axis_values(run.id, series, options, parts[run.id])
            curves.append(
                thinned_curve(
                    series,
                    x,
                    _smoothed(series.values, options),
                    options,
                    name=run.name,
                    arm=labels[str(run.id)],
                    slot=arms.of(run).slot,
                    is_quiet=run.id in background,
                    run_id=run.id,
                )
            )
    return curves


def _read(
    runs: Sequence[Run], parts: Mapping[UUID, DrawnSteps], name: str, points: int | None, *, is_timed: bool
) -> dict[UUID, queries.Series]:
    """The scalar of each run; those of the same steps are read together."""
    together: dict[tuple[int | None, int | None], list[Run]] = {}
    for run in runs:
        together.setdefault((parts[run.id].first, parts[run.id].last), []).append(run)
    read: dict[UUID, queries.Series] = {}
    for (first, last), group in together.items():
        if points is None or is_timed:
            ids = [run.id for run in group]
            read |= queries.scalars(ids, name, first=first, last=last, points=points, timed=is_timed)
        else:
            read |= thinned_scalars(group, name, first=first, last=last, points=points)
    return read


def _smoothed(y: Floats, options: Options) -> Floats:
    """The strong line; empty if the values are drawn as they are."""
    span = default_span(len(y))
    return centred_average(y, span) if options.smooth and span > 1 else np.zeros(0)


def thinned_curve(
    series: queries.Series,
    x: Floats,
    smoothed: Floats,
    options: Options,
    *,
    name: str,
    arm: str,
    slot: Slot,
    is_quiet: bool = False,
    run_id: UUID | None = None,
) -> Curve:
    """A curve with as many points as are drawn. `smoothed`: its strong line at the same x; empty for none."""
    # By position, not by x, because steps, tokens and times may be unevenly spaced.
    drawn = keep(np.arange(len(x)), series.values, options.points)
    strong = keep(np.arange(len(smoothed)), smoothed, options.points)
    return Curve(
        name=name,
        arm=arm,
        slot=slot,
        x=x[drawn],
        y=series.values[drawn],
        smooth_x=x[strong],
        smooth_y=smoothed[strong],
        quiet=is_quiet,
        run_id=run_id,
        places=StepPlaces(steps=series.steps.astype(np.float64), x=x, drawn=drawn),
    )


@dataclass(frozen=True)
class DrawnSteps:
    """The steps of a run that a chart shows, and the time from which it counts; None is that of the first."""

    first: int | None
    last: int | None
    begin: np.datetime64 | None = None


def part_of(run_id: UUID, name: str, options: Options) -> DrawnSteps:
    """The steps in the range of a chart; for tokens or time, to the next known points outside of it."""
    if options.span is None:
        return DrawnSteps(options.first, options.last)
    is_timed = options.axis in TIMED
    measure = queries.scalar(run_id, name if is_timed else "tokens", points=RANGE_POINTS, timed=is_timed)
    if not len(measure):
        # Without tokens the axis shows steps.
        return DrawnSteps(step_of(str(options.span[0])), step_of(str(options.span[1])))
    begin = _begin_of(run_id, measure) if is_timed else None
    x = _times(measure, options.axis, begin) if begin is not None else measure.values
    # A run that has gone back to an earlier step can have times that decrease.
    low, high = (int(np.searchsorted(np.fmax.accumulate(x), bound)) for bound in options.span)
    first, last = measure.steps[max(low - 1, 0)], measure.steps[min(high, len(x) - 1)]
    return DrawnSteps(int(first), int(last), begin)


def _begin_of(run_id: UUID, series: queries.Series) -> np.datetime64:
    """The time of the run's first step, from which all of its charts count. A metric may begin later."""
    stored = queries.step_range(run_id)
    if stored is not None and series.steps[0] > stored[0]:
        names = sorted(queries.scalar_names(run_id), key=lambda name: name != "loss")
        for name in names[:MAX_ASKED]:
            first = queries.scalar(run_id, name, last=stored[0])
            if len(first):
                return np.datetime64(first.times[0])
    return np.datetime64(series.times[0])


def _times(series: queries.Series, axis: Axis, begin: np.datetime64) -> Floats:
    """Minutes since the first step, or milliseconds of the clock in the reader's time zone."""
    if axis == "time":
        return np.asarray((series.times - begin) / np.timedelta64(60, "s"), np.float64)
    since_1970 = (series.times - np.datetime64(0, "us")) / np.timedelta64(1, "ms")
    return np.asarray(since_1970 + _zone_milliseconds(begin), np.float64)


def _zone_milliseconds(begin: np.datetime64) -> float:
    """Return the reader's offset to UTC when the run began, which holds for the rest of the run, too."""
    moment = datetime.fromtimestamp(float(begin.astype("datetime64[us]").astype(np.int64)) / 1e6, UTC)
    ahead = timezone.localtime(moment).utcoffset()
    return 0.0 if ahead is None else 1_000.0 * ahead.total_seconds()


def axis_values(run_id: UUID, series: queries.Series, options: Options, part: DrawnSteps) -> Floats:
    """The horizontal positions of a series that is not empty, in the units of the axis."""
    if options.axis in TIMED:
        begin = _begin_of(run_id, series) if part.begin is None else part.begin
        return _times(series, options.axis, begin)
    if options.axis == "tokens":
        tokens = queries.scalar(run_id, "tokens", first=part.first, last=part.last, timed=False)
        if len(tokens):
            return np.interp(series.steps, tokens.steps, tokens.values)
    return series.steps.astype(np.float64)


def _span_of(low: str, high: str) -> tuple[float, float] | None:
    """A range in an address; None if there is none that can be meant."""
    try:
        first, last = float(low), float(high)
    except ValueError:
        return None
    return (first, last) if math.isfinite(first) and math.isfinite(last) and first < last else None


def step_of(text: str | None) -> int | None:
    """A step in an address, rounded; None if it is not a number or far too large."""
    try:
        value = round(float(text)) if text else None
    except (ValueError, OverflowError):
        return None
    return None if value is None or abs(value) > MAX_STEP else value
