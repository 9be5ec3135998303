"""Figures of a run's curves: its panels, loss, scalars, step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from django.http import QueryDict
from numpy.typing import NDArray

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.addresses import DrawRunFigure
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.arms import Arms
from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.ranges import central_range
from fp8scope_dashboard.pages.charts.run_marks import marks_of
from fp8scope_dashboard.pages.charts.series import (
    AXIS_TITLES,
    Options,
    loss_curves,
    loss_figure,
    scalar_curves,
)
from fp8scope_dashboard.pages.charts.theme import Slot
from fp8scope_dashboard.pages.formatting import number, percent
from fp8scope_dashboard.pages.run.anatomy.parts import PARTS, read_shares, scalar_of
from fp8scope_dashboard.pages.run.efficiency import read_split
from fp8scope_dashboard.pages.run.figures.anatomy_shares import anatomy_figure
from fp8scope_dashboard.pages.run.figures.panel_content import load_panels
from fp8scope_dashboard.pages.run.figures.panels import panels_figure
from fp8scope_dashboard.pages.run.figures.step_phases import efficiency_figure
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

# Baseline seeds drawn behind a run's loss.
SEEDS_SHOWN = 8
COLUMNS, COMPACT_COLUMNS = 400, 120
GRADIENT_SLOTS: Final[tuple[Slot, ...]] = ("shade-3", "shade-1", "shade-2")
HALVING_SHARE: Final = 1e-5
"""The share of values at the maximum above which a reducer of gradients halves its factor."""
UNITS: Final = {"tokens_per_second": "tokens / s", "step_seconds": "seconds / step"}


def _loss(run: Run, query: QueryDict, options: Options) -> AnyChart:
    baselines = comparison_runs.baseline_runs(run)[-SEEDS_SHOWN:] if query.get("baseline", "1") == "1" else []
    curves = loss_curves(
        [run, *baselines], Arms(run.project), options, quiet=[baseline.id for baseline in baselines]
    )
    mine = [curve for curve in curves if not curve.quiet]
    if not mine:
        return EmptyChart("No loss yet. Log it with step.log(loss=…).")
    marks = marks_of(run, options, mine[0].places)
    drawn = loss_figure(curves, options, marks=marks, picks_steps=True)
    return Chart(drawn, _describe(run, "loss", mine[0].y))


def _panels(run: Run, query: QueryDict, options: Options) -> AnyChart:
    loaded = load_panels(run, options, also=query.get("also", ""))
    if not loaded.panels:
        return EmptyChart("No loss yet. Log it with step.log(loss=…).")
    # These panels are always over steps.
    marks = marks_of(run, replace(options, axis="step"))
    x_range = loaded.x_range
    if options.first is not None and options.last is not None and options.first < options.last:
        x_range = (float(options.first), float(options.last))
    if x_range is not None:
        # An alert of a later start of the run may lie beyond what is shown.
        marks = [mark for mark in marks if x_range[0] <= mark.x <= x_range[1]]
    drawn = panels_figure(loaded.panels, options.theme, compact=options.compact, marks=marks, x_range=x_range)
    return Chart(drawn, " ".join(loaded.sentences))


def _scalar(run: Run, query: QueryDict, options: Options) -> AnyChart:
    name = query.get("name", "")
    logged = run.last_scalars
    if not name:
        name = next((scalar for scalar in UNITS if scalar in logged), "")
    curves = scalar_curves([run], name, Arms(run.project), options) if name in logged else []
    if not curves:
        return EmptyChart("No values yet. Pass tokens=… to run.step() to get tokens per second.")
    unit = UNITS.get(name, glossary.title(name))
    y_range = None if options.zoomed else central_range([curves[0].y], from_zero=name in UNITS)
    drawn = curves_figure(
        curves,
        options.theme,
        y_range=y_range,
        log=options.log,
        compact=options.compact,
        x_title=AXIS_TITLES[options.axis],
        y_title=unit,
        marks=marks_of(run, options, curves[0].places),
        is_dated=options.axis == "wall",
        picks_steps=True,
    )
    return Chart(drawn, _describe(run, unit, curves[0].y))


def _efficiency(run: Run, query: QueryDict, options: Options) -> AnyChart:
    points = COMPACT_COLUMNS if options.compact else COLUMNS
    split = read_split(run.id, first=options.first, last=options.last, points=points)
    if not len(split.x):
        return EmptyChart("No step times yet. Call run.watch(model, optimizer).")
    # On a narrow screen the legend has one line for each phase.
    height = 400 if options.compact else 320
    drawn = efficiency_figure(split, options.theme, compact=options.compact, height=height)
    shares = ", ".join(f"{glossary.title(name)} {percent(share)}" for name, share in split.shares.items())
    return Chart(drawn, f"Step time of {run.name} by phase: {shares}.")


def _anatomy(run: Run, query: QueryDict, options: Options) -> AnyChart:
    points = COMPACT_COLUMNS if options.compact else COLUMNS
    shown = read_shares(run.id, first=options.first, last=options.last, points=points)
    if not len(shown.x):
        return EmptyChart("No anatomy of these steps. Call run.watch(model, optimizer).")
    means = zip(PARTS, shown.shares.mean(axis=1).tolist(), strict=True)
    shares = ", ".join(f"{glossary.title(scalar_of(part))} {percent(mean)}" for part, mean in means if mean)
    return Chart(
        anatomy_figure(shown, options.theme, compact=options.compact),
        f"Shares of the parts in a step of {run.name}: {shares}.",
    )


def _gradient_scaling(run: Run, query: QueryDict, options: Options) -> AnyChart:
    names = ("fp8_gradients/mu_max", "fp8_gradients/mu_median", "fp8_gradients/mu_min")
    return _gradient_curves(run, options, names, "scaling factor", log=True)


def _gradient_saturation(run: Run, query: QueryDict, options: Options) -> AnyChart:
    return _gradient_curves(run, options, ("fp8_gradients/saturated_max",), "saturated share", log=False)


def _gradient_curves(run: Run, options: Options, names: Sequence[str], unit: str, *, log: bool) -> AnyChart:
    curves = []
    for name, slot in zip(names, GRADIENT_SLOTS, strict=False):
        if name not in run.last_scalars:
            continue
        line = queries.scalar(
            run.id, name, first=options.first, last=options.last, points=options.points, timed=False
        )
        if len(line):
            x = line.steps.astype(np.float64)
            curves.append(
                Curve(name=glossary.title(name), arm=glossary.title(name), slot=slot, x=x, y=line.values)
            )
    if not curves:
        return EmptyChart("No gradients reduced in FP8 in these steps.")
    largest = max(float(curve.y[np.isfinite(curve.y)].max(initial=0.0)) for curve in curves)
    drawn = curves_figure(
        curves,
        options.theme,
        # From zero to what would halve a factor at least, so that shares that do not matter look small.
        y_range=None if log else (0.0, 1.1 * max(largest, HALVING_SHARE)),
        log=log,
        compact=options.compact,
        height=240,
        y_title=unit,
    )
    return Chart(drawn, " ".join(_describe(run, curve.name, curve.y) for curve in curves))


def _describe(run: Run, quantity: str, values: NDArray[np.float64]) -> str:
    broken = int(np.count_nonzero(~np.isfinite(values)))
    note = f" {broken} of the points shown are not finite." if broken else ""
    first, last = number(float(values[0])), number(float(values[-1]))
    return f"{quantity} of {run.name}: {last} at the last step, {first} at the first.{note}"


FIGURES: Final[dict[str, DrawRunFigure]] = {
    "panels": _panels,
    "loss": _loss,
    "scalar": _scalar,
    "efficiency": _efficiency,
    "anatomy": _anatomy,
    "gradient_scaling": _gradient_scaling,
    "gradient_saturation": _gradient_saturation,
}
