"""Panels of a run above each other on one axis of steps: loss, delta, tensors out of range, gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.pages.charts.curves import Curve
from fp8scope_dashboard.pages.charts.marks import Mark, draw_marks, stretches
from fp8scope_dashboard.pages.charts.plain_figure import PlainFigure
from fp8scope_dashboard.pages.charts.ranges import Range
from fp8scope_dashboard.pages.charts.theme import (
    DASHES,
    Slot,
    Theme,
    base_layout,
    escaped,
    faded,
    steps_axis,
)
from fp8scope_dashboard.statistics.arrays import Floats

# Pixels between two panels, where the title of the lower one stands, and around all of them. The legend is
# below the menu of the figure.
GAP: Final = 30
TOP, BOTTOM = 50, 36
# The height of the marks of a run in the first panel, from its lower edge.
MARK_SHARE: Final = 0.035
# The legend is above the title of the first panel.
TITLE: Final = 20
# Plotly writes values below this with prefixes such as µ, as of units.
SMALL: Final = 1e-3


@dataclass(frozen=True, kw_only=True)
class Band:
    """The mean of several runs and the range that they span, float64[N] each."""

    name: str
    slot: Slot
    x: Floats
    mean: Floats
    low: Floats
    high: Floats

    @property
    def is_wide(self) -> bool:
        return bool((self.high > self.low).any())


@dataclass(frozen=True, kw_only=True)
class PlainLine:
    """A line without an arm: `tone` is danger, warning or muted. `unit` is a d3 format of its values."""

    name: str
    x: Floats
    y: Floats
    tone: str = "muted"
    unit: str = ".4~g"
    is_area: bool = False
    is_faint: bool = False


@dataclass(frozen=True, kw_only=True)
class ShownInterval:
    """A confidence sequence, float64[N] each, drawn with the colour of an arm."""

    name: str
    slot: Slot
    x: Floats
    middle: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, kw_only=True)
class FigurePanel:
    """One panel.

    Attributes:
        title: what it shows; stands above it.
        height: pixels.
        zone: a range of y that is shaded as good, e.g. the tolerance.
        y_range: of the axis; on a log axis of the values, > 0.
        tick_format: a d3 format.
        is_blank: no value is finite, so the axis has no numbers.
    """

    title: str
    height: int
    y_range: Range | None = None
    curves: Sequence[Curve] = ()
    bands: Sequence[Band] = ()
    lines: Sequence[PlainLine] = ()
    interval: ShownInterval | None = None
    zone: Range | None = None
    log: bool = False
    tick_format: str = ""
    is_blank: bool = False


def panels_figure(
    panels: Sequence[FigurePanel],
    theme: Theme,
    *,
    compact: bool = False,
    marks: Sequence[Mark] = (),
    x_range: Range | None = None,
) -> PlainFigure:
    """Draw panels from top to bottom on one x axis, so that one brush and one crosshair are for all.

    Raises:
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("Draw at least one panel.")
    has_legend = bool(panels[0].bands)
    top = TOP + TITLE if has_legend else TOP
    height = top + BOTTOM + sum(panel.height for panel in panels) + GAP * (len(panels) - 1)
    layout = base_layout(theme, compact=compact, height=height, x_title="step")
    drawing = _PanelDrawing(layout["yaxis"])
    domains = _domains([panel.height for panel in panels])
    for number, (panel, domain) in enumerate(zip(panels, domains, strict=True), 1):
        axis = "y" if number == 1 else f"y{number}"
        # The legend of the first panel holds for all.
        legend = number == 1 and has_legend
        _axis(drawing, panel, axis, domain, theme)
        _draw(drawing, panel if number == 1 else _named(panel), axis, theme, legend=legend)
    draw_marks(drawing, marks, theme, axis="y", height=_height_of_marks(panels[0]))
    x_axis = layout["xaxis"]
    layout |= {
        **drawing.axes,
        "shapes": drawing.shapes,
        "annotations": drawing.notes,
        "xaxis": {
            **x_axis,
            "anchor": f"y{len(panels)}" if len(panels) > 1 else "y",
            "showspikes": True,
            "spikemode": "across",
            "spikesnap": "cursor",
            "spikethickness": 1,
            "spikedash": "solid",
            "spikecolor": theme.muted,
            **({} if x_range is None else steps_axis(*x_range)),
        },
        # One hover for all panels.
        "hoversubplots": "axis",
        "margin": {"l": 48 if compact else 60, "r": 10, "t": top, "b": BOTTOM, "pad": 0},
        "showlegend": has_legend,
        "legend": {**layout["legend"], "y": 1.0 + TITLE / (height - top - BOTTOM)},
    }
    return PlainFigure(drawing.traces, layout)


def _height_of_marks(panel: FigurePanel) -> float | None:
    """A little above the lower edge, where the pointer is still over the panel; None without a range."""
    if panel.y_range is None:
        return None
    low, high = panel.y_range
    return low * (high / low) ** MARK_SHARE if panel.log else low + (high - low) * MARK_SHARE


def _named(panel: FigurePanel) -> FigurePanel:
    """The panel with its title in the names of its runs: one hover and one table hold those of all panels."""
    return replace(
        panel,
        curves=[replace(curve, name=f"{panel.title}, {curve.name}") for curve in panel.curves],
        bands=[replace(band, name=f"{panel.title}, {band.name}") for band in panel.bands],
    )


@dataclass
class _PanelDrawing:
    """The additions to a figure. `axis` is the layout that all y axes share."""

    axis: dict[str, Any]
    traces: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, Any] = field(default_factory=dict)

    def add_scatter(self, **trace: Any) -> None:
        given = {key: value for key, value in trace.items() if value is not None}
        self.traces.append({"type": "scatter", "xaxis": "x", **given})

    def add_shape(self, **shape: Any) -> None:
        self.shapes.append(shape)


def _domains(heights: Sequence[int]) -> list[tuple[float, float]]:
    """The part of the drawing's height of each panel, from 0 at the bottom to 1 at the top."""
    whole = sum(heights) + GAP * (len(heights) - 1)
    domains, top = [], float(whole)
    for height in heights:
        domains.append((max(0.0, (top - height) / whole), top / whole))
        top -= height + GAP
    return domains


def _axis(
    drawing: _PanelDrawing,
    panel: FigurePanel,
    axis: str,
    domain: tuple[float, float],
    theme: Theme,
) -> None:
    layout: dict[str, Any] = {
        **drawing.axis,
        "domain": list(domain),
        "anchor": "x",
        # The brush selects steps.
        "fixedrange": True,
        "title": {**drawing.axis["title"], "text": ""},
        "type": "log" if panel.log else "linear",
        "showticklabels": not panel.is_blank,
        "nticks": 3 if panel.height < 70 else 5 if panel.height < 120 else 6,
    }
    ticks = log_ticks(panel.y_range) if panel.log and panel.y_range is not None else []
    # Plotly finds ticks of a range that is narrower than 1, 2, 5.
    if len(ticks) > 1:
        layout |= {"tickvals": ticks, "minor": {"ticks": ""}}
    if panel.tick_format:
        layout["tickformat"] = panel.tick_format
    elif panel.y_range is not None and max(map(abs, panel.y_range)) < SMALL:
        # A loss of 2µ is no way to write 2·10⁻⁶.
        layout["exponentformat"] = "power"
    if panel.y_range is not None:
        layout["range"] = list(np.log10(panel.y_range)) if panel.log else list(panel.y_range)
        layout["autorange"] = False
    drawing.axes["yaxis" if axis == "y" else f"yaxis{axis[1:]}"] = layout
    drawing.notes.append(
        {
            "text": escaped(panel.title),
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": domain[1],
            "xanchor": "left",
            "yanchor": "bottom",
            "yshift": 3,
            "showarrow": False,
            "font": {"size": 12, "color": theme.muted},
        }
    )


def log_ticks(y_range: Range) -> list[float]:
    """Ticks of a log axis: powers of ten, at most five, or 1, 2 and 5 times them if the range has few."""
    low, high = y_range
    powers = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1.0)
    decades = [float(10.0**power) for power in powers if low <= 10.0**power <= high]
    if len(decades) > 5:
        return decades[:: -(-len(decades) // 5)]
    if len(decades) > 2:
        return decades
    finer = sorted(float(digit * 10.0**power) for power in powers for digit in (1.0, 2.0, 5.0))
    return [tick for tick in finer if low <= tick <= high]


def _draw(drawing: _PanelDrawing, panel: FigurePanel, axis: str, theme: Theme, *, legend: bool) -> None:
    if panel.zone is not None:
        _zone(drawing, panel.zone, axis, theme)
    for band in panel.bands:
        _draw_band(drawing, band, axis, theme, legend=legend)
    if panel.interval is not None:
        _draw_interval(drawing, panel.interval, axis, panel.y_range, theme, panel.tick_format or ".4~g")
    for line in panel.lines:
        _draw_line(drawing, line, axis, theme)
    for curve in panel.curves:
        _draw_curve(drawing, curve, axis, panel, theme, legend=legend)


def _zone(drawing: _PanelDrawing, zone: Range, axis: str, theme: Theme) -> None:
    drawing.add_shape(
        type="rect",
        xref="paper",
        yref=axis,
        x0=0,
        x1=1,
        y0=zone[0],
        y1=zone[1],
        fillcolor=faded(theme.good, 0.13),
        line={"width": 0},
        layer="below",
    )
    middle = (zone[0] + zone[1]) / 2.0
    drawing.add_shape(
        type="line", xref="paper", yref=axis, x0=0, x1=1, y0=middle, y1=middle,
        line={"color": theme.muted, "width": 1}, layer="below",
    )  # fmt: skip


def _area(
    drawing: _PanelDrawing, name: str, x: Floats, low: Floats, high: Floats, axis: str, colour: str
) -> None:
    finite = np.isfinite(low) & np.isfinite(high)
    x, low, high = x[finite], low[finite], high[finite]
    drawing.add_scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        yaxis=axis,
        fill="toself",
        fillcolor=faded(colour, 0.18),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        name=escaped(name),
        showlegend=False,
    )


def _draw_band(drawing: _PanelDrawing, band: Band, axis: str, theme: Theme, *, legend: bool) -> None:
    colour = theme.arms[band.slot]
    if band.is_wide:
        _area(drawing, band.name, band.x, band.low, band.high, axis, colour)
    drawing.add_scatter(
        x=band.x,
        y=np.where(np.isfinite(band.mean), band.mean, np.nan),
        yaxis=axis,
        mode="lines",
        name=escaped(band.name),
        line={"color": colour, "width": 1.6, "dash": DASHES[band.slot]},
        hovertemplate=f"%{{y:.5~g}}<extra>{escaped(band.name)}</extra>",
        showlegend=legend,
    )


def _draw_interval(
    drawing: _PanelDrawing, interval: ShownInterval, axis: str, y_range: Range | None, theme: Theme, unit: str
) -> None:
    colour = theme.arms[interval.slot]
    low, high = interval.low, interval.high
    if y_range is not None:
        # After few points the interval is far wider than the panel.
        reach = y_range[1] - y_range[0]
        low, high = (np.clip(bound, y_range[0] - reach, y_range[1] + reach) for bound in (low, high))
    _area(drawing, interval.name, interval.x, low, high, axis, colour)
    drawing.add_scatter(
        x=interval.x,
        y=interval.middle,
        yaxis=axis,
        mode="lines",
        name=escaped(interval.name),
        line={"color": colour, "width": 2.0, "dash": DASHES[interval.slot]},
        customdata=np.stack([interval.low, interval.high], axis=1),
        hovertemplate=f"%{{y:{unit}}} [%{{customdata[0]:{unit}}}, %{{customdata[1]:{unit}}}]"
        f"<extra>{escaped(interval.name)}</extra>",
        showlegend=False,
    )
    if y_range is not None:
        _mark_outside(
            drawing, interval.name, interval.slot, interval.x, interval.middle, axis, y_range, theme
        )


def _draw_line(drawing: _PanelDrawing, line: PlainLine, axis: str, theme: Theme) -> None:
    colour = {"danger": theme.danger, "warning": theme.warning}.get(line.tone, theme.muted)
    drawing.add_scatter(
        x=line.x,
        y=np.where(np.isfinite(line.y), line.y, np.nan),
        yaxis=axis,
        mode="lines" if len(line.x) > 1 else "markers",
        marker={"color": colour, "size": 6},
        name=escaped(line.name),
        line={"color": faded(colour, 0.55) if line.is_faint else colour, "width": 1 if line.is_faint else 1.6,
              "shape": "hv" if line.is_area else "linear"},
        fill="tozeroy" if line.is_area else None,
        fillcolor=faded(colour, 0.16) if line.is_area else None,
        hovertemplate=f"%{{y:{line.unit}}}<extra>{escaped(line.name)}</extra>",
        showlegend=False,
    )  # fmt: skip


def _draw_curve(
    drawing: _PanelDrawing, curve: Curve, axis: str, panel: FigurePanel, theme: Theme, *, legend: bool
) -> None:
    """The raw values faintly under the smooth line; what is not finite or outside is marked at the edge."""
    colour = theme.arms[curve.slot]
    has_smooth = len(curve.smooth_x) > 0
    # The dashes of a noisy line cannot be told from its noise.
    dash = DASHES[curve.slot] if has_smooth else "solid"
    y = np.where(np.isfinite(curve.y) & ((curve.y > 0) | (not panel.log)), curve.y, np.nan)
    drawing.add_scatter(
        x=curve.x,
        y=y,
        yaxis=axis,
        name=escaped(curve.name),
        mode="lines" if np.count_nonzero(np.isfinite(y)) > 1 else "markers",
        line={"color": faded(colour, 0.38) if has_smooth else colour, "width": 1 if has_smooth else 1.8,
              "dash": "solid"},
        marker={"color": colour, "size": 7},
        hoverinfo="skip" if has_smooth else None,
        hovertemplate=None if has_smooth else f"%{{y:.5~g}}<extra>{escaped(curve.name)}</extra>",
        showlegend=legend and not has_smooth,
    )  # fmt: skip
    if has_smooth:
        smooth = np.where((curve.smooth_y > 0) | (not panel.log), curve.smooth_y, np.nan)
        drawing.add_scatter(
            x=curve.smooth_x,
            y=smooth,
            yaxis=axis,
            mode="lines",
            name=escaped(curve.name),
            line={"color": colour, "width": 2.2, "dash": dash},
            hovertemplate=f"%{{y:.5~g}}<extra>{escaped(curve.name)}</extra>",
            showlegend=legend,
        )
    if panel.y_range is not None:
        _mark_outside(drawing, curve.name, curve.slot, curve.x, curve.y, axis, panel.y_range, theme)


def _mark_outside(
    drawing: _PanelDrawing,
    name: str,
    slot: Slot,
    x: Floats,
    y: Floats,
    axis: str,
    y_range: Range,
    theme: Theme,
) -> None:
    """Mark where values are not finite or outside of the panel, at its edge."""
    broken = ~np.isfinite(y)
    with np.errstate(invalid="ignore"):
        above, below = (y > y_range[1]) & ~broken, (y < y_range[0]) & ~broken
    colour = theme.arms[slot]
    for mask, symbol, edge, shade, words in (
        (broken, "x-thin", y_range[1], theme.danger, "not finite"),
        (above, "triangle-up", y_range[1], colour, "above the panel"),
        (below, "triangle-down", y_range[0], colour, "below the panel"),
    ):
        ends = np.unique(stretches(mask))
        if not len(ends):
            continue
        drawing.add_scatter(
            x=x[ends],
            y=np.full(len(ends), edge),
            yaxis=axis,
            mode="markers",
            marker={"symbol": symbol, "size": 9, "color": shade, "line": {"width": 2, "color": shade}},
            text=["NaN" if np.isnan(value) else f"{value:.5g}" for value in y[ends]],
            name=escaped(f"{name}: {words}"),
            showlegend=False,
            hovertemplate=f"%{{text}}<extra>{escaped(name)}, {words}</extra>",
            cliponaxis=False,
        )
