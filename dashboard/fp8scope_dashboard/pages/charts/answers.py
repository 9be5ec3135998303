"""The answers of figures: a figure as JSON, its data, or why there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import plotly.graph_objects as go
from django.http import HttpRequest, HttpResponse
from django.utils.cache import add_never_cache_headers

from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.charts.svg import svg_of, text_svg
from fp8scope_dashboard.pages.charts.table import table_of
from fp8scope_dashboard.pages.charts.theme import theme_named
from fp8scope_dashboard.runs.models import Run

# Space above a chart for its menu and its legend.
MENU_PIXELS = 28
# The least, usual and largest width of a picture in pixels.
SVG_WIDTHS = (320, 900, 2_400)
TITLE_LENGTH = 120

Builder = Callable[[HttpRequest, Run, Options], HttpResponse]


class FigureAnswer(HttpResponse):
    """A figure for plotly. The middleware FigureFormats turns it into other formats."""

    def __init__(self, figure: go.Figure, summary: str) -> None:
        margin = figure.layout.margin
        if (margin.t or 0) < MENU_PIXELS:
            margin.t = MENU_PIXELS
        body = f'{{"figure":{figure.to_json(validate=False)},"summary":{json.dumps(summary)}}}'
        super().__init__(body, content_type="application/json")
        self.figure, self.summary = figure, summary


class EmptyAnswer(HttpResponse):
    """Why there is no figure and how to get one."""

    def __init__(self, text: str) -> None:
        super().__init__(json.dumps({"empty": text}), content_type="application/json")
        self.reason = text


def figure_answer(figure: go.Figure, summary: str) -> HttpResponse:
    """A figure with a one-sentence description for screen readers."""
    return FigureAnswer(figure, summary)


def empty_answer(text: str) -> HttpResponse:
    """A text that says why there is no figure and how to get one."""
    return EmptyAnswer(text)


def in_format(request: HttpRequest, answer: FigureAnswer | EmptyAnswer) -> HttpResponse:
    """The answer in the format that the address asks for: csv, json (its data) or svg; else as it is."""
    form = request.GET.get("format", "")
    if form not in ("svg", "csv", "json"):
        return answer
    file = _file(request, answer, form)
    # The headers of the view are those of its own answer.
    add_never_cache_headers(file)
    return file


def _file(request: HttpRequest, answer: FigureAnswer | EmptyAnswer, form: str) -> HttpResponse:
    if form == "svg":
        return HttpResponse(_svg(request, answer), content_type="image/svg+xml")
    if isinstance(answer, EmptyAnswer):
        return HttpResponse(f"{answer.reason}\n", status=404, content_type="text/plain; charset=utf-8")
    table = table_of(answer.figure)
    if form == "csv":
        body, kind = table.csv().encode(), "text/csv; charset=utf-8"
    else:
        body, kind = table.json(answer.summary), "application/json"
    file = HttpResponse(body, content_type=kind)
    file["Content-Disposition"] = f'attachment; filename="{_file_name(request)}.{form}"'
    return file


def _svg(request: HttpRequest, answer: FigureAnswer | EmptyAnswer) -> str:
    """The chart as a picture of the requested width; a sentence where there is none."""
    width = _bounded(request.GET.get("width", ""), SVG_WIDTHS)
    if isinstance(answer, FigureAnswer):
        theme, title = theme_named(request.GET.get("theme", "")), request.GET.get("title", "")[:TITLE_LENGTH]
        drawn = svg_of(answer.figure, theme, width=width, title=title)
        if drawn is not None:
            return drawn
    text = answer.reason if isinstance(answer, EmptyAnswer) else answer.summary
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
