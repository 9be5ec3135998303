"""Draw a figure as SVG on the server: for the first paint, without JavaScript, for print and for files.

It draws what the figures of this folder use: lines, markers, bars, areas, error bars, heat maps, shapes and
annotations, in panels with a common horizontal axis. The picture in a page is as wide as the page allows and
uses the colours of the page's theme; a file has a size and fixed colours.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.pages.charts.axes import Axis, axis_of, drawable, floats
from fp8scope_dashboard.pages.charts.plain_figure import AnyFigure, PlainFigure, readable
from fp8scope_dashboard.pages.charts.sparkline import stretches
from fp8scope_dashboard.pages.charts.svg import legend
from fp8scope_dashboard.pages.charts.svg.legend import Legend
from fp8scope_dashboard.pages.charts.svg.pen import CHARACTER, Pen
from fp8scope_dashboard.pages.charts.svg.picture import picture_of, rgb
from fp8scope_dashboard.pages.charts.theme import Theme
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry.downsample import keep

# A line in a page is stretched to the width of its panel, which has this many units.
UNITS: Final = 10_000
# Points of a line: about two for each pixel of a chart's width.
MAX_POINTS: Final = 1_000
MAX_MARKERS: Final = 300
TITLE_PIXELS: Final = 28
# Of the margin above a chart: what a menu and one row of a legend take.
LEGEND_ROOM: Final = 28
SYMBOLS: Final[Mapping[str, str]] = {
    "circle": "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0 -1 0Z",
    "square": "M-.9-.9H.9V.9H-.9Z",
    "diamond": "M0-1.25L1.25 0L0 1.25L-1.25 0Z",
    "triangle-up": "M0-1.2L1.1.8H-1.1Z",
    "triangle-down": "M0 1.2L1.1-.8H-1.1Z",
    "x-thin": "M-1-1L1 1M-1 1L1-1",
}


@dataclass(frozen=True)
class _Panel:
    """A part of the chart with its own vertical axis, in pixels from the top."""

    top: float
    height: float
    y: Axis
    name: str


def svg_of(figure: AnyFigure, theme: Theme, *, width: int | None = None, title: str = "") -> str | None:
    """The figure as SVG text, or None if it has something that this module does not draw.

    Args:
        theme: that of the figure.
        width: in pixels, for a file; None for a page, where the picture is as wide as its parent.
        title: a line above the chart of a file.
    """
    plain = readable(figure)
    return _Drawing(plain, theme, width, title).svg() if drawable(plain) else None


def text_svg(text: str, width: int) -> str:
    """A sentence as a picture, for a chart that has nothing to draw."""
    lines = textwrap.wrap(text, max(20, int((width - 20) / (13 * CHARACTER)))) or [""]
    height = 20 * len(lines) + 20
    words = "".join(
        f'<text x="10" y="{26 + 20 * i}" fill="#5b6676">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-size="13" font-family="sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{words}</svg>'


class _Drawing:
    """One figure on its way to SVG."""

    def __init__(self, figure: PlainFigure, theme: Theme, width: int | None, title: str) -> None:
        self.figure, self.theme, self.width, self.title = figure, theme, width, title
        self.pen = Pen(theme, width)
        self.height = int(figure.layout.height or 340)
        margin = figure.layout.margin
        # Plotly puts the legend above the margin that a figure asks for.
        self.legend = Legend(figure, self.pen)
        # Further rows of the legend make a file higher, so that its panels keep their height.
        room = max(0.0, float(margin.t or 0) - LEGEND_ROOM)
        rows = max(0.0, legend.PIXELS * max(0, len(self.legend.rows) - 1) - room)
        added = (TITLE_PIXELS if title and width else 0) + math.ceil(rows)
        self.top = float(margin.t or 0) + added + (9 if self.legend.rows else 0)
        self.full_height = self.height + added
        bottom = self.full_height - float(margin.b or 36)
        self.x = axis_of(figure, "x", bottom - self.top)
        self.panels = list(self._panels(bottom - self.top))
        self.left = max(float(margin.l or 0), max(self._label_width(panel) for panel in self.panels))
        self.right = float(margin.r or 10) + (
            48 if any(trace.type == "heatmap" for trace in figure.data) else 0
        )
        self.bottom = bottom
        self.stacks: dict[tuple[str, str], Floats] = {}

    def svg(self) -> str:
        """All parts, from back to front."""
        if self.width:
            size = f'viewBox="0 0 {self.width} {self.full_height}" width="{self.width}"'
            family = html.escape(self.figure.layout.font.family or "sans-serif")
            parts = [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} height="{self.full_height}" font-size="11" '
                f'font-family="{family}"><rect width="100%" height="100%" fill="{self.theme.surface}"/>',
                self.pen.text(self.left, 20, self.title, size=15, weight=600),
            ]
        else:
            # The margins are outside, so that shares of the width are shares of the panels' width.
            style = f"margin-left:{self.left:g}px;width:calc(100% - {self.left + self.right:g}px)"
            parts = [
                f'<svg height="{self.full_height}" style="{style}" overflow="visible" font-size="11" '
                'aria-hidden="true" focusable="false">'
            ]
        for panel in self.panels:
            parts += [self._open(panel), *self._panel(panel), "</svg>"]
        parts += [*self.legend.svg(self.left, self.top, self.bottom), "</svg>"]
        return "".join(parts)

    def _panels(self, height: float) -> Iterator[_Panel]:
        layout = self.figure.layout
        for name in sorted({_key(trace.yaxis, "y") for trace in self.figure.data} | {"yaxis"}):
            base = layout[name].overlaying
            low, high = layout[_key(base, "y") if base else name].domain or (0.0, 1.0)
            part = height * (high - low)
            yield _Panel(self.top + height * (1 - high), part, axis_of(self.figure, _short(name), part), name)

    def _label_width(self, panel: _Panel) -> float:
        if not panel.y.visible:
            return 0.0
        longest = max((len(label) for _, label in panel.y.ticks), default=0)
        return longest * CHARACTER * panel.y.font_size + 12 + (20 if panel.y.title else 0)

    def _open(self, panel: _Panel) -> str:
        inner = self.width - self.left - self.right if self.width else 0
        position = f'x="{self.left:g}" width="{inner:g}"' if self.width else 'width="100%"'
        return f'<svg y="{panel.top:g}" {position} height="{panel.height:g}" overflow="visible">'

    def _panel(self, panel: _Panel) -> Iterator[str]:
        shapes = [
            shape for shape in self.figure.layout.shapes if panel.name in self._panels_of(shape.yref, panel)
        ]
        if panel.y.visible:
            yield from self._grid(panel)
        yield from (self._shape(panel, shape) for shape in shapes if shape.layer == "below")
        traces = [trace for trace in self.figure.data if _key(trace.yaxis, "y") == panel.name]
        yield from (part for trace in traces for part in self._trace(panel, trace))
        yield from (self._shape(panel, shape) for shape in shapes if shape.layer != "below")
        for note in self.figure.layout.annotations:
            if panel.name in self._panels_of(note.yref, panel):
                yield self._annotation(panel, note)

    def _panels_of(self, yref: str | None, panel: _Panel) -> tuple[str, ...]:
        """The panels in which a shape is drawn: one on paper is part of the first."""
        if yref == "paper":
            return ("yaxis",)
        return (_key((yref or "y").split(" ")[0], "y"),)

    # Axes

    def _grid(self, panel: _Panel) -> Iterator[str]:
        for value, label in panel.y.ticks:
            y = panel.height * (1 - panel.y.share(value))
            if panel.y.grid:
                yield f'<line x2="100%" y1="{y:.1f}" y2="{y:.1f}"{self.pen.stroke(self.theme.grid, 1)}/>'
            yield self.pen.text(
                -6, y + 3.5, label, colour=self.theme.muted, anchor="end", size=panel.y.font_size
            )
        if panel.y.title:
            x, middle = -self.left + 13, panel.height / 2
            words = self.pen.text(x, middle, panel.y.title, colour=self.theme.muted, anchor="middle", size=12)
            yield words.replace("<text ", f'<text transform="rotate(-90 {x:g} {middle:g})" ', 1)
        lowest = max(other.top + other.height for other in self.panels)
        if panel.top + panel.height < lowest - 1:
            return
        for value, label in self.x.ticks:
            at = f"{100 * self.x.share(value):.2f}%"
            y = panel.height
            stroke = self.pen.stroke(self.theme.grid, 1)
            yield f'<line x1="{at}" x2="{at}" y1="{y:g}" y2="{y + 4:g}"{stroke}/>'
            yield self.pen.text(at, y + 16, label, colour=self.theme.muted, anchor="middle")
        yield self.pen.text(
            "50%", panel.height + 31, self.x.title, colour=self.theme.muted, anchor="middle", size=12
        )

    # Traces

    def _trace(self, panel: _Panel, trace: Any) -> Iterator[str]:
        if trace.type == "heatmap":
            yield from self._heatmap(panel, trace)
        elif trace.type == "bar":
            yield from self._bars(panel, trace)
        else:
            yield from self._scatter(panel, trace)

    def _scatter(self, panel: _Panel, trace: Any) -> Iterator[str]:
        x, y = floats(trace.x), floats(trace.y)
        if not len(x):
            return
        if trace.stackgroup:
            key = (panel.name, trace.stackgroup)
            below = self.stacks.get(key, np.zeros(len(y)))
            y = below + y
            self.stacks[key] = y
            yield self._area(panel, np.concatenate([x, x[::-1]]), np.concatenate([y, below[::-1]]), trace)
        elif trace.fill == "toself":
            yield self._area(panel, x, y, trace)
        elif trace.fill == "tozeroy":
            ends = np.array([x[-1], x[0]])
            yield self._area(panel, np.concatenate([x, ends]), np.concatenate([y, np.zeros(2)]), trace)
        mode = trace.mode or "lines"
        if "lines" in mode and trace.line.width != 0:
            yield self._line(panel, x, y, trace)
        if trace.error_y.array is not None:
            yield from self._whiskers(panel, x, y, trace.error_y)
        if "markers" in mode:
            yield from self._markers(panel, x, y, trace)

    def _line(self, panel: _Panel, x: Floats, y: Floats, trace: Any) -> str:
        if trace.line.shape == "hv" and len(x) > 1:
            x, y = np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]
        if len(x) > MAX_POINTS:
            indices = keep(np.arange(len(y)), y, MAX_POINTS)
            x, y = x[indices], y[indices]
        across, down = self._units(panel, x, y)
        parts = []
        for part in stretches(np.isfinite(across) & np.isfinite(down)):
            points = _joined(across[part.start : part.stop], down[part.start : part.stop])
            # A line without length is a dot, with its round ends.
            parts.append(f"M{points}" if len(part) > 1 else f"M{points}h0")
        width = float(trace.line.width or 2)
        stroke = self.pen.stroke(trace.line.color or self.theme.text, width, trace.line.dash, stretched=True)
        paint = f'fill="none" stroke-linejoin="round" stroke-linecap="round"{stroke}'
        return self._stretched(panel, f'<path d="{"".join(parts)}" {paint}/>')

    def _area(self, panel: _Panel, x: Floats, y: Floats, trace: Any) -> str:
        across, down = self._units(panel, x, y)
        seen = np.isfinite(across) & np.isfinite(down)
        points = _joined(across[seen], down[seen])
        return (
            self._stretched(panel, f'<path d="M{points}Z"{self.pen.fill(trace.fillcolor)}/>')
            if points
            else ""
        )

    def _whiskers(self, panel: _Panel, x: Floats, y: Floats, error: Any) -> Iterator[str]:
        up = floats(error.array)
        down = floats(error.arrayminus) if error.arrayminus is not None else up
        stroke = self.pen.stroke(error.color or self.theme.text, float(error.thickness or 1.5))
        for at, value, high, low in zip(x, y, up, down, strict=False):
            top, bottom = (panel.height * (1 - panel.y.share(end)) for end in (value + high, value - low))
            if np.isfinite([top, bottom]).all():
                position = f"{100 * self.x.share(at):.2f}%"
                yield f'<line x1="{position}" x2="{position}" y1="{top:.1f}" y2="{bottom:.1f}"{stroke}/>'

    def _markers(self, panel: _Panel, x: Floats, y: Floats, trace: Any) -> Iterator[str]:
        marker = trace.marker
        radius = float(marker.size or 6) / 2
        colours = marker.color if isinstance(marker.color, list | tuple) else [marker.color] * len(x)
        path = SYMBOLS.get(str(marker.symbol or "circle"), SYMBOLS["circle"])
        is_thin = str(marker.symbol).endswith("-thin")
        # Without cliponaxis, marks at the edge of the chart are drawn in full.
        low, high = (-0.01, 1.01) if trace.cliponaxis is False else (0.0, 1.0)
        drawn = 0
        for at, value, colour in zip(x, y, colours, strict=False):
            across, up = self.x.share(at), panel.y.share(value)
            if not (low <= across <= high and low <= up <= high) or drawn >= MAX_MARKERS:
                continue
            drawn += 1
            paint = (
                f'fill="none"{self.pen.stroke(colour, 2 / radius)}'
                if is_thin
                else self.pen.fill(colour or self.theme.text)
            )
            yield (
                f'<svg x="{100 * across:.2f}%" y="{panel.height * (1 - up):.1f}" overflow="visible">'
                f'<path transform="scale({radius:g})" d="{path}" {paint.strip()}/></svg>'
            )

    def _bars(self, panel: _Panel, trace: Any) -> Iterator[str]:
        x, y = floats(trace.x), floats(trace.y)
        horizontal = trace.orientation == "h"
        along, across = (y, x) if horizontal else (x, y)
        gaps = np.diff(np.unique(along))
        width = trace.width if trace.width is not None else 0.8 * (gaps.min() if len(gaps) else 1.0)
        for middle, end in zip(along, across, strict=False):
            sides, ends = (middle - width / 2, middle + width / 2), (0.0, end)
            yield self._rectangle(
                panel, *(ends if horizontal else sides), *(sides if horizontal else ends)
            ).replace("/>", f"{self.pen.fill(trace.marker.color)}/>")

    def _heatmap(self, panel: _Panel, trace: Any) -> Iterator[str]:
        z = np.asarray(trace.z, np.float64)
        x, y = floats(trace.x), floats(trace.y)
        scale = [(float(at), rgb(colour)) for at, colour in trace.colorscale]
        low, high = float(trace.zmin), float(trace.zmax)
        left, right = self.x.share(x[0] - _half(x)), self.x.share(x[-1] + _half(x))
        top, bottom = (panel.height * (1 - panel.y.share(end)) for end in (y[0] - 0.5, y[-1] + 0.5))
        # The first row is on top if the axis is reversed, as for names; numbers rise.
        if top > bottom:
            z, top, bottom = z[::-1], bottom, top
        picture = picture_of(z, scale, low, high)
        # Cells at the ends reach beyond the panel.
        yield (
            f'<svg width="100%" height="{panel.height:g}" overflow="hidden">'
            f'<image x="{100 * left:.2f}%" y="{top:.1f}" width="{100 * (right - left):.2f}%" '
            f'height="{abs(bottom - top):.1f}" preserveAspectRatio="none" image-rendering="pixelated" '
            f'href="{picture}"/></svg>'
        )
        bar = picture_of(np.linspace(high, low, 64)[:, None], scale, low, high)
        yield (
            f'<svg x="100%" overflow="visible"><image x="6" width="10" height="{panel.height:g}" '
            f'preserveAspectRatio="none" href="{bar}"/>'
        )
        for at, label in zip(trace.colorbar.tickvals or (), trace.colorbar.ticktext or (), strict=False):
            y_at = panel.height * (1 - (float(at) - low) / (high - low))
            yield self.pen.text(19, y_at + 3.5, label, colour=self.theme.muted)
        yield "</svg>"

    # Shapes and words

    def _shape(self, panel: _Panel, shape: Any) -> str:
        x = [self._across(value, shape.xref) for value in (shape.x0, shape.x1)]
        y = [self._down(panel, value, shape.yref) for value in (shape.y0, shape.y1)]
        if shape.type == "line":
            if x[0] == x[1] and not 0 <= x[0] <= 1:
                return ""
            stroke = self.pen.stroke(
                shape.line.color or self.theme.text, float(shape.line.width or 2), shape.line.dash
            )
            ends = f'x1="{100 * x[0]:.2f}%" x2="{100 * x[1]:.2f}%" y1="{y[0]:.1f}" y2="{y[1]:.1f}"'
            return f"<line {ends}{stroke}/>" if min(y) >= 0 and max(y) <= self.full_height else ""
        left, right = np.clip(sorted(x), 0, 1)
        top, bottom = np.clip(
            sorted(y), 0, self.bottom - panel.top if shape.yref == "paper" else panel.height
        )
        return (
            f'<rect x="{100 * left:.2f}%" y="{top:.1f}" width="{100 * (right - left):.2f}%" '
            f'height="{bottom - top:.1f}"{self.pen.fill(shape.fillcolor)}/>'
        )

    def _rectangle(self, panel: _Panel, x0: float, x1: float, y0: float, y1: float) -> str:
        # Bars begin at 0, which a logarithmic axis has at its lower end.
        left, right = np.clip(sorted(np.nan_to_num([self.x.share(value) for value in (x0, x1)])), 0, 1)
        low, high = np.clip(sorted(np.nan_to_num([panel.y.share(value) for value in (y0, y1)])), 0, 1)
        return (
            f'<rect x="{100 * left:.2f}%" y="{panel.height * (1 - high):.1f}" '
            f'width="{100 * (right - left):.2f}%" height="{panel.height * (high - low):.1f}"/>'
        )

    def _annotation(self, panel: _Panel, note: Any) -> str:
        x, y = self._across(note.x, note.xref), self._down(panel, note.y, note.yref)
        if not -0.01 <= x <= 1.01:
            return ""
        anchor = {"left": "start", "right": "end"}.get(note.xanchor, "middle")
        size = float(note.font.size or 12)
        below = {"top": size, "bottom": -3.0}.get(note.yanchor, 0.35 * size)
        words = self.pen.text(
            float(note.xshift or 0), y + below - float(note.yshift or 0), note.text, colour=note.font.color,
            anchor=anchor, size=size,
        )  # fmt: skip
        return f'<svg x="{100 * x:.2f}%" overflow="visible">{words}</svg>'

    # Positions

    def _across(self, value: Any, ref: str | None) -> float:
        is_share = ref == "paper" or str(ref).endswith(" domain")
        return float(value) if is_share else self.x.share(float(value))

    def _down(self, panel: _Panel, value: Any, ref: str | None) -> float:
        if ref == "paper":
            return (self.bottom - self.top) * (1 - float(value)) - (panel.top - self.top)
        if str(ref).endswith(" domain"):
            return panel.height * (1 - float(value))
        return panel.height * (1 - panel.y.share(float(value)))

    def _units(self, panel: _Panel, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Positions in the units of a stretched part; bounded, because browsers draw no lines far outside."""
        width = 10 * (self.width - self.left - self.right) if self.width else UNITS
        across, up = self.x.shares(x), np.where(np.isfinite(y), panel.y.shares(y), np.nan)
        with np.errstate(invalid="ignore"):
            return width * np.clip(across, -1, 2), 10 * panel.height * (1 - np.clip(up, -2, 3))

    def _stretched(self, panel: _Panel, content: str) -> str:
        width = 10 * (self.width - self.left - self.right) if self.width else UNITS
        return (
            f'<svg width="100%" height="{panel.height:g}" viewBox="0 0 {width:g} {10 * panel.height:g}" '
            f'preserveAspectRatio="none">{content}</svg>'
        )


def _half(x: Floats) -> float:
    return float(x[1] - x[0]) / 2 if len(x) > 1 else 0.5


def _key(axis: str | None, letter: str) -> str:
    """The name in the layout of an axis such as y2, or of the first one."""
    return f"{letter}axis{(axis or letter)[1:]}"


def _short(name: str) -> str:
    return name.replace("axis", "", 1)


def _joined(across: Floats, down: Floats) -> str:
    """The points of a path as text, in whole units."""
    return " ".join(map(str, np.rint(np.column_stack([across, down])).astype(np.int64).ravel().tolist()))
