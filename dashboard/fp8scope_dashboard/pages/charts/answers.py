"""Charts as functions return them, and the answers made of them: JSON for plotly, a picture, or data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse

from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.charts.plain_figure import AnyFigure, PlainFigure
from fp8scope_dashboard.pages.charts.svg import svg_of, text_svg
from fp8scope_dashboard.pages.charts.table import table_of
from fp8scope_dashboard.pages.charts.theme import theme_named

# Space above a chart for its menu and its legend.
MENU_PIXELS = 28
# The least, usual and largest width of a picture in pixels.
SVG_WIDTHS = (320, 900, 2_400)
TITLE_LENGTH = 120


@dataclass(frozen=True)
class Chart:
    """A figure for plotly, with a one-sentence description for screen readers."""

    figure: AnyFigure
    summary: str

    def json(self) -> str:
        """The figure and its description, with space for the menu above."""
        is_low = (self.figure.layout.margin.t or 0) < MENU_PIXELS
        if isinstance(self.figure, PlainFigure):
            if is_low:
                self.figure.update_part("margin", t=MENU_PIXELS)
            figure = self.figure.to_json()
        else:
            if is_low:
                self.figure.layout.margin.t = MENU_PIXELS
            figure = self.figure.to_json(validate=False)
        return f'{{"figure":{figure},"summary":{json.dumps(self.summary)}}}'


@dataclass(frozen=True)
class EmptyChart:
    """The reason that there is no figure, and the way to get one. `status`: of the file instead of it."""

    reason: str
    status: int = 404

    def json(self) -> str:
        """The reason, as the script of charts reads it."""
        return json.dumps({"empty": self.reason})


AnyChart = Chart | EmptyChart


def answer(request: HttpRequest, chart: AnyChart) -> HttpResponse:
    """A chart in the format that the address asks for: svg, csv or json (its data); else for plotly."""
    form = request.GET.get("format", "")
    if form not in ("svg", "csv", "json"):
        return HttpResponse(chart.json(), content_type="application/json")
    return _file(request, chart, form)


def _file(request: HttpRequest, chart: AnyChart, form: str) -> HttpResponse:
    if form == "svg":
        return HttpResponse(_svg(request, chart), content_type="image/svg+xml")
    if isinstance(chart, EmptyChart):
        return HttpResponse(
            f"{chart.reason}\n", status=chart.status, content_type="text/plain; charset=utf-8"
        )
    table = table_of(chart.figure)
    if form == "csv":
        body, kind = table.csv().encode(), "text/csv; charset=utf-8"
    else:
        body, kind = table.json(chart.summary), "application/json"
    file = HttpResponse(body, content_type=kind)
    file["Content-Disposition"] = f'attachment; filename="{_file_name(request)}.{form}"'
    return file


def _svg(request: HttpRequest, chart: AnyChart) -> str:
    """The chart as a picture of the requested width; a sentence where there is none."""
    width = _bounded(request.GET.get("width", ""), SVG_WIDTHS)
    if isinstance(chart, Chart):
        theme, title = theme_named(request.GET.get("theme", "")), request.GET.get("title", "")[:TITLE_LENGTH]
        drawn = svg_of(chart.figure, theme, width=width, title=title)
        if drawn is not None:
            return drawn
    text = chart.reason if isinstance(chart, EmptyChart) else chart.summary
    return text_svg(text, width)


def _bounded(text: str, limits: tuple[int, int, int]) -> int:
    least, default, most = limits
    number = whole_number(text, 8)
    return default if number is None else min(most, max(least, number))


def _file_name(request: HttpRequest) -> str:
    """From the address: the figure, and the beginning of the run's id if it is a run's."""
    figure = re.sub(r"[^a-z0-9-]", "", request.path.rpartition("/")[2].removesuffix(".json")) or "figure"
    run = re.search(r"/runs/([0-9a-f]{8})", request.path)
    return f"fp8scope-{figure}-{run[1]}" if run else f"fp8scope-{figure}"
