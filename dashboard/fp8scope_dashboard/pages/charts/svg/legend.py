"""The legend of a picture: rows of entries in a file, a list that the browser breaks in a page."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any, Final

from fp8scope_dashboard.pages.charts.plain_figure import PlainFigure
from fp8scope_dashboard.pages.charts.svg.pen import CHARACTER, Pen, plain
from fp8scope_dashboard.pages.charts.theme import shortened

# The height of a row, and the width beside it in a file.
PIXELS: Final = 20
MARGINS: Final = 80


class Legend:
    """The names of a figure's lines. `rows`: the traces that it names."""

    def __init__(self, figure: PlainFigure, pen: Pen) -> None:
        self._figure, self._pen, self._width = figure, pen, pen.width
        self.rows = self._in_rows()

    def _entries(self) -> list[Any]:
        """The traces that the legend names, as plotly chooses them."""
        entries = [trace for trace in self._figure.data if trace.showlegend is not False and trace.name]
        shown = self._figure.layout.showlegend
        is_map = any(trace.type == "heatmap" for trace in self._figure.data)
        return [] if shown is False or is_map or (not shown and len(entries) < 2) else entries

    def _in_rows(self) -> list[list[Any]]:
        """The entries in rows that fit a file; of a page, where the browser makes the rows, in one."""
        rows: list[list[Any]] = []
        room = 0.0
        for trace in self._entries():
            width = _width_of(trace)
            if not rows or (self._width and width > room):
                rows.append([])
                room = (self._width or 0) - MARGINS
            rows[-1].append(trace)
            room -= width
        return rows

    def svg(self, left: float, top: float, bottom: float) -> Iterator[str]:
        """The legend above panels between `top` and `bottom`, in pixels."""
        # Plotly's legend may stand higher than just above the panels.
        above = top - (bottom - top) * max(0.0, float(self._figure.layout.legend.y or 1.0) - 1.0)
        if not self._width and self.rows:
            yield self._of_page(above)
            return
        for row, traces in enumerate(reversed(self.rows)):
            x, y = left, above - 11 - PIXELS * row
            for trace in traces:
                yield from self._entry(trace, x, y, (self._width or 0) - left - x)
                x += _width_of(trace)

    def _of_page(self, above: float) -> str:
        """The legend as HTML: the browser makes its rows, upwards, and cuts names that are too long."""
        entries = "".join(
            '<li><svg width="26" height="12" aria-hidden="true">'
            f"{''.join(self._swatch(trace, 0, 10))}</svg><span>{html.escape(plain(trace.name))}</span></li>"
            for trace in self.rows[0]
        )
        return (
            f'<foreignObject width="100%" height="{max(above - 5, 0):g}" class="figure__names">'
            f'<ul xmlns="http://www.w3.org/1999/xhtml">{entries}</ul></foreignObject>'
        )

    def _entry(self, trace: Any, x: float, y: float, room: float) -> Iterator[str]:
        yield from self._swatch(trace, x, y)
        most = int((room - 32) / (12 * CHARACTER))
        yield self._pen.text(x + 32, y, shortened(plain(trace.name), max(12, most)), size=12)

    def _swatch(self, trace: Any, x: float, y: float) -> Iterator[str]:
        colour = trace.line.color if trace.type == "scatter" and trace.line.color else trace.marker.color
        is_area = trace.type == "scatter" and bool(trace.stackgroup)
        colour = trace.fillcolor if is_area else colour
        if is_area or trace.type == "bar" or "lines" not in (trace.mode or "lines"):
            yield f'<rect x="{x + 8:g}" y="{y - 9:g}" width="10" height="10"{self._pen.fill(colour)}/>'
        else:
            stroke = self._pen.stroke(
                colour or self._pen.theme.text, float(trace.line.width or 2), trace.line.dash
            )
            yield f'<line x1="{x:g}" x2="{x + 26:g}" y1="{y - 4:g}" y2="{y - 4:g}"{stroke}/>'


def _width_of(trace: Any) -> float:
    """The width in pixels of an entry of the legend, with the space behind it."""
    return 50 + len(plain(trace.name)) * 12 * CHARACTER
