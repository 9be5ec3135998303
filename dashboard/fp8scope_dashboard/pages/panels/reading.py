"""Read what a panel shows: the values of its metrics and of its formula, smoothed and thinned for drawing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import numpy as np

from fp8scope_dashboard.db.regular_expressions import PatternError, matching
from fp8scope_dashboard.pages.charts.arms import Arms
from fp8scope_dashboard.pages.charts.curves import Curve
from fp8scope_dashboard.pages.charts.series import TIMED, Options, axis_values, part_of, thinned_curve
from fp8scope_dashboard.pages.charts.smoothing import centred_average, default_span, exponential_average
from fp8scope_dashboard.pages.charts.theme import PALETTE, Slot
from fp8scope_dashboard.pages.panels import formulas
from fp8scope_dashboard.pages.panels.panel import MAX_METRICS, Panel, PanelError
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries

# Without smoothing, a line is read with so many times the points that are drawn.
SPARE_POINTS: Final = 4


@dataclass(frozen=True)
class PanelContent:
    """The curves of a panel, and sentences about what it does not show."""

    curves: list[Curve]
    notes: list[str]


def read_content(run: Run, panel: Panel, options: Options) -> PanelContent:
    """The curves of a panel: one of each metric, and one of its formula.

    Raises:
        PanelError: the formula or the pattern cannot be used with the metrics of this run.
    """
    logged = queries.scalar_names(run.id)
    names, notes = _metrics(panel, logged)
    lines = [(name, name, _series(run, name, panel, options)) for name in names]
    if panel.formula:
        basis, series = _formula(run, panel, options, logged)
        lines.append((panel.formula, basis, series))
    own = Arms(run.project).of(run).slot
    others = [slot for slot in PALETTE if slot != own]
    slots: list[Slot] = [own, *others]
    curves = []
    for (label, basis, series), slot in zip(lines, slots, strict=False):
        if not len(series):
            notes.append(f"{label} has no values here.")
            continue
        x = axis_values(run.id, series, options, part_of(run.id, basis, options))
        smoothed = _smoothed(series.values, panel)
        curves.append(thinned_curve(series, x, smoothed, options, name=label, arm=label, slot=slot))
    return PanelContent(curves, notes)


def _metrics(panel: Panel, logged: Collection[str]) -> tuple[list[str], list[str]]:
    """The scalars that a panel shows, and what is left out."""
    names = [name for name in panel.metrics if name in logged]
    notes = [f"This run has not logged {name}." for name in panel.metrics if name not in logged]
    if panel.pattern:
        try:
            matched = matching(list(logged), panel.pattern)
        except PatternError as error:
            raise PanelError(str(error)) from error
        names += [name for name in matched if name not in names]
        if not matched:
            notes.append("The regular expression matches no metric of this run.")
    most = MAX_METRICS - bool(panel.formula)
    if len(names) > most:
        notes.append(f"{len(names) - most} more metrics match: a panel shows {MAX_METRICS} lines.")
    return names[:most], notes


def _series(run: Run, name: str, panel: Panel, options: Options) -> queries.Series:
    part = part_of(run.id, name, options)
    points = SPARE_POINTS * options.points if panel.smoothing == "none" else None
    is_timed = options.axis in TIMED
    return queries.scalar(run.id, name, first=part.first, last=part.last, points=points, timed=is_timed)


def _formula(run: Run, panel: Panel, options: Options, logged: Collection[str]) -> tuple[str, queries.Series]:
    """A metric of the formula, and the formula's values at the steps at which all of its metrics have one."""
    try:
        node = formulas.parse(panel.formula, logged)
    except formulas.FormulaError as error:
        raise PanelError(str(error)) from error
    names = sorted(formulas.metrics_of(node))
    if not names:
        raise PanelError("The formula has no metric.")
    if len(names) > MAX_METRICS:
        raise PanelError(f"A formula has at most {MAX_METRICS} metrics.")
    if missing := [name for name in names if name not in logged]:
        raise PanelError(f"This run has not logged {', '.join(missing)}, which the formula needs.")
    every = replace(panel, smoothing="auto")
    read = {name: _series(run, name, every, options) for name in names}
    steps = reduce(np.intersect1d, (series.steps for series in read.values()))
    at = {name: np.searchsorted(series.steps, steps) for name, series in read.items()}
    values = formulas.evaluate(node, {name: read[name].values[at[name]] for name in names})
    first = read[names[0]]
    return names[0], queries.Series(steps, values, first.times[at[names[0]]])


def _smoothed(y: Floats, panel: Panel) -> Floats:
    """The strong line; empty if the values are drawn as they are."""
    if panel.smoothing == "exponential" and panel.strength > 0:
        return exponential_average(y, panel.strength)
    span = {"auto": default_span(len(y)), "window": int(panel.strength) | 1}.get(panel.smoothing, 1)
    return centred_average(y, span) if span > 1 else np.zeros(0)
