"""A figure as a standalone SVG image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from html import escape, unescape
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.pages.figures.frozen import marks
from fp8scope_dashboard.pages.figures.frozen.axes import Axis, numbers, range_of
from fp8scope_dashboard.pages.figures.theme import FONT

WIDTH: Final = 900
TOP, RIGHT, BOTTOM = 12.0, 14.0, 46.0
LEGEND_ROW = 20.0
COLOUR_BAR = 74.0
CHARACTER = 6.2
"""Mean width of a character of a label, in pixels."""
LONGEST_LABEL = 36

Options = Mapping[str, Any]


def figure_svg(figure: Options, label: str) -> str:
    """Draw a figure of plotly's JSON. `label` describes it to people who do not see it."""
    return _Drawing(figure).svg(label)


class _Drawing:
    def __init__(self, figure: Options) -> None:
        self.layout: Options = figure["layout"]
        self.traces: Sequence[Options] = figure["data"]
        self.height = float(self.layout.get("height", 340))
        self.legend = self._legend()
        self.has_bar = any(trace.get("type") == "heatmap" for trace in self.traces)
        left = 76.0 if not self._labels_of_rows() else 12.0 + CHARACTER * self._labels_of_rows()
        self.area = (
            left,
            TOP + LEGEND_ROW * len(self.legend),
            WIDTH - RIGHT - (COLOUR_BAR if self.has_bar else 0.0),
            self.height - BOTTOM,
        )
        self.axes = {name: self._axis(name) for name in self._names()}

    def svg(self, label: str) -> str:
        """The whole image."""
        names = self._pairs()
        body = "".join(self._subplot(x, y) for x, y in names)
        text = str(((self.layout.get("font") or {}).get("color")) or "#1b2330")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" '
            f'aria-label="{escape(label)}" font-family="{escape(FONT)}" font-size="12" fill="{escape(text)}">'
            f"{self._legend_svg()}{body}{self._bar()}</svg>"
        )

    def _labels_of_rows(self) -> int:
        """Characters of the longest name of a heat map's rows; 0 if they are not named."""
        axis = self.layout.get("yaxis") or {}
        texts = axis.get("ticktext") or []
        if axis.get("tickmode") != "array" or axis.get("showticklabels") is False or not texts:
            return 0
        return min(LONGEST_LABEL, max(len(unescape(str(text))) for text in texts))

    def _names(self) -> set[str]:
        used = {"x", "y"}
        for trace in self.traces:
            used |= {str(trace.get("xaxis", "x")), str(trace.get("yaxis", "y"))}
        return used

    def _options(self, name: str) -> Options:
        options: Options = self.layout.get(f"{name[0]}axis{name[1:]}") or {}
        return options

    def _axis(self, name: str) -> Axis:
        options = self._options(name)
        base = self._options(str(options.get("overlaying") or name))
        first, last = options.get("domain") or base.get("domain") or (0.0, 1.0)
        left, top, right, bottom = self.area
        start, end = (left, right) if name[0] == "x" else (bottom, top)
        shared = str(options.get("matches") or name)
        values, cells = [], False
        for trace in self.traces:
            own = str(trace.get(f"{name[0]}axis", name[0]))
            if own == name or str(self._options(own).get("matches") or own) == shared:
                values.append(numbers(trace.get(name[0])).reshape(-1))
                cells = cells or trace.get("type") == "heatmap"
        source = options if options.get("range") is not None else self._options(shared)
        low, high = range_of({**options, **({"range": source.get("range")})}, values, cells=cells)
        span = end - start
        return Axis(
            low, high, start + first * span, start + last * span, options.get("type") == "log", options
        )

    def _pairs(self) -> list[tuple[str, str]]:
        """The subplots in the order of their traces; axes that lie over another have none of their own."""
        pairs = {
            (str(trace.get("xaxis", "x")), self._base(str(trace.get("yaxis", "y")))): 0
            for trace in self.traces
        }
        return list(pairs) or [("x", "y")]

    def _base(self, name: str) -> str:
        return str(self._options(name).get("overlaying") or name)

    def _subplot(self, x_name: str, y_name: str) -> str:
        x_axis, y_axis = self.axes[x_name], self.axes[y_name]
        area = (x_axis.start, y_axis.end, x_axis.end, y_axis.start)
        clip = f"clip{hashlib.sha256(repr((area, self.traces)).encode()).hexdigest()[:12]}"
        under: list[str] = []
        over: list[str] = []
        for shape in self.layout.get("shapes") or ():
            if self._is_in(shape, x_name, y_name):
                drawn = marks.shape(shape, x_axis, y_axis, area)
                (under if shape.get("layer") == "below" else over).append(drawn)
        traces = [
            self._trace(trace)
            for trace in self.traces
            if str(trace.get("xaxis", "x")) == x_name and self._base(str(trace.get("yaxis", "y"))) == y_name
        ]
        return (
            f'<clipPath id="{clip}"><rect x="{area[0]:.1f}" y="{area[1] - 4:.1f}" '
            f'width="{area[2] - area[0]:.1f}" height="{area[3] - area[1] + 8:.1f}"/></clipPath>'
            f"{self._grid(x_axis, y_axis)}"
            f'<g clip-path="url(#{clip})">{"".join(under)}{"".join(traces)}{"".join(over)}</g>'
        )

    def _is_in(self, shape: Options, x_name: str, y_name: str) -> bool:
        x_ref, y_ref = (str(shape.get(key, key[0])).removesuffix(" domain") for key in ("xref", "yref"))
        return x_ref in ("paper", x_name) and y_ref in ("paper", y_name)

    def _trace(self, trace: Options) -> str:
        x_axis = self.axes[str(trace.get("xaxis", "x"))]
        y_axis = self.axes[str(trace.get("yaxis", "y"))]
        if trace.get("visible") in (False, "legendonly"):
            return ""
        if trace.get("type") == "heatmap":
            return marks.heat_map(trace, x_axis, y_axis)
        if trace.get("type", "scatter") in ("scatter", "scattergl"):
            return marks.scatter(trace, x_axis, y_axis)
        return ""

    def _grid(self, x_axis: Axis, y_axis: Axis) -> str:
        muted = str((y_axis.options.get("tickfont") or {}).get("color") or "#5b6676")
        grid = str(y_axis.options.get("gridcolor") or "#e3e7ed")
        parts = [f'<g fill="{escape(muted)}" font-size="11" stroke-width="1">']
        for at, label in y_axis.ticks():
            if y_axis.options.get("showgrid") is not False:
                parts.append(
                    f'<path d="M{x_axis.start:.1f} {at:.1f}H{x_axis.end:.1f}" stroke="{escape(grid)}"/>'
                )
            parts.append(_text(x_axis.start - 6, at + 4, label, "end"))
        for at, label in x_axis.ticks():
            parts.append(
                f'<path d="M{at:.1f} {y_axis.start:.1f}v4" stroke="{escape(grid)}"/>'
                + _text(at, y_axis.start + 17, label, "middle")
            )
        parts.append(
            f'<path d="M{x_axis.start:.1f} {y_axis.start:.1f}H{x_axis.end:.1f}" stroke="{escape(grid)}"/>'
        )
        if title := _title(x_axis.options):
            parts.append(_text((x_axis.start + x_axis.end) / 2, y_axis.start + 34, title, "middle"))
        if title := _title(y_axis.options):
            centre = (y_axis.start + y_axis.end) / 2
            parts.append(
                f'<text transform="translate(13 {centre:.1f}) rotate(-90)" text-anchor="middle">'
                f"{escape(title)}</text>"
            )
        return "".join([*parts, "</g>"])

    def _legend(self) -> list[list[Options]]:
        """The traces of the legend, by row."""
        if self.layout.get("showlegend") is False:
            return []
        named = [
            trace
            for trace in self.traces
            if trace.get("type", "scatter") == "scatter"
            and trace.get("showlegend") is not False
            and trace.get("name")
        ]
        if len(named) < 2 and not self.layout.get("showlegend"):
            return []
        rows: list[list[Options]] = []
        used = float(WIDTH)
        for trace in named:
            width = 46 + CHARACTER * len(unescape(str(trace["name"])))
            if used + width > WIDTH - 70:
                rows.append([])
                used = 0.0
            rows[-1].append(trace)
            used += width
        return rows

    def _legend_svg(self) -> str:
        parts = []
        for row, traces in enumerate(self.legend):
            x, y = self.area[0], TOP + LEGEND_ROW * row
            for trace in traces:
                name = unescape(str(trace["name"]))
                line, marker = trace.get("line") or {}, trace.get("marker") or {}
                if "lines" in str(trace.get("mode", "lines")):
                    drawn = f'<path d="M{x:.1f} {y:.1f}h22" fill="none" {marks.stroke(line)}/>'
                else:
                    drawn = marks.scatter(
                        {"mode": "markers", "x": [x + 11], "y": [y], "marker": marker}, _same, _same
                    )
                parts.append(drawn + _text(x + 28, y + 4, name, "start"))
                x += 46 + CHARACTER * len(name)
        return "".join(parts)

    def _bar(self) -> str:
        """The colour scale of a heat map."""
        trace = next((trace for trace in self.traces if trace.get("type") == "heatmap"), None)
        if trace is None:
            return ""
        bar = trace.get("colorbar") or {}
        x, top, bottom = self.area[2] + 12, self.area[1], self.area[3]
        low, high = float(trace["zmin"]), float(trace["zmax"])
        name = f"bar{hashlib.sha256(repr(trace['colorscale']).encode()).hexdigest()[:12]}"
        stops = "".join(
            f'<stop offset="{float(stop):.3f}" stop-color="{escape(str(colour))}"/>'
            for stop, colour in trace["colorscale"]
        )
        labels = "".join(
            _text(x + 16, bottom - (value - low) / ((high - low) or 1.0) * (bottom - top) + 4, label, "start")
            for value, label in zip(numbers(bar.get("tickvals")), bar.get("ticktext") or (), strict=False)
        )
        return (
            f'<linearGradient id="{name}" x1="0" x2="0" y1="1" y2="0">{stops}</linearGradient>'
            f'<rect x="{x:.1f}" y="{top:.1f}" width="10" height="{bottom - top:.1f}" fill="url(#{name})"/>'
            f'<g font-size="11">{labels}</g>'
        )


_same = Axis(0.0, 1.0, 0.0, 1.0)


def _title(options: Options) -> str:
    title = options.get("title") or {}
    return unescape(str(title.get("text") or "")) if isinstance(title, Mapping) else str(title)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    plain = re.sub(r"<[^>]*>", " ", unescape(text)) if "<br" in text else unescape(text)
    if not np.isfinite([x, y]).all():
        return ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(plain)}</text>'
