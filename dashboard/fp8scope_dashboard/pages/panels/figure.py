"""The figure of a panel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.marks import Mark
from fp8scope_dashboard.pages.charts.plain_figure import PlainFigure
from fp8scope_dashboard.pages.charts.ranges import Range, central_range, loss_range
from fp8scope_dashboard.pages.charts.series import AXIS_TITLES, Options
from fp8scope_dashboard.pages.formatting import number
from fp8scope_dashboard.pages.panels.panel import PIXELS, Panel

# The most lines that the description names.
MAX_DESCRIBED: Final = 4


def panel_figure(
    panel: Panel, curves: Sequence[Curve], options: Options, marks: Sequence[Mark] = ()
) -> PlainFigure:
    """Draw the curves of a panel. A legend names them if there are several."""
    figure = curves_figure(
        curves,
        options.theme,
        y_range=None if options.zoomed else _range(panel, curves),
        log=panel.log,
        compact=options.compact,
        height=PIXELS[panel.height],
        x_title=AXIS_TITLES[options.axis],
        y_title="",
        marks=marks,
        is_dated=options.axis == "wall",
        picks_steps=True,
    )
    if panel.log and not options.zoomed and (ends := _log_range(panel, curves)) is not None:
        figure.update_part("yaxis", range=ends, autorange=False)
    return figure


def description(panel: Panel, curves: Sequence[Curve], notes: Sequence[str]) -> str:
    """A sentence for screen readers, and what the panel leaves out."""
    parts = [f"{curve.name}: {number(float(curve.y[-1]))} at the end" for curve in curves[:MAX_DESCRIBED]]
    more = f" and {len(curves) - MAX_DESCRIBED} more lines" if len(curves) > MAX_DESCRIBED else ""
    return " ".join([f"{panel.name}. {'; '.join(parts)}{more}.", *notes])


def title_of(panel: Panel) -> str:
    """The title of a panel: of one metric, the one that the glossary has."""
    plain = len(panel.metrics) == 1 and not (panel.title or panel.formula or panel.pattern)
    return glossary.title(panel.metrics[0]) if plain and panel.metrics[0] in glossary.GLOSSARY else panel.name


def _range(panel: Panel, curves: Sequence[Curve]) -> Range | None:
    """The chosen range, with an end that nobody chose from the data."""
    values = [curve.y for curve in curves]
    is_loss = all(curve.name.casefold().endswith("loss") for curve in curves)
    usual = loss_range(values) if is_loss else central_range(values)
    if usual is None or (panel.low is None and panel.high is None):
        return usual
    low, high = usual[0] if panel.low is None else panel.low, usual[1] if panel.high is None else panel.high
    return (low, high) if low < high else (low, low + 1.0) if panel.high is None else (high - 1.0, high)


def _log_range(panel: Panel, curves: Sequence[Curve]) -> list[float] | None:
    """The chosen range as powers of ten; None if the axis contains all positive values."""
    if panel.low is None and panel.high is None:
        return None
    positive = [float(value) for curve in curves for value in curve.y if 0.0 < value < math.inf]
    low = panel.low if panel.low is not None and panel.low > 0 else min(positive, default=0.0)
    high = panel.high if panel.high is not None and panel.high > 0 else max(positive, default=0.0)
    return [math.log10(low), math.log10(high)] if 0.0 < low < high else None
