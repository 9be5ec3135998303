"""The chart that a page shows at once: drawn on the server, replaced by plotly when its script has loaded.

The page also brings what plotly needs, so that the script asks for nothing before it draws.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from django.http import HttpRequest, QueryDict
from django.utils.safestring import SafeString, mark_safe

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import person
from fp8scope_dashboard.pages.charts.addresses import figure_at
from fp8scope_dashboard.pages.charts.answers import Chart, EmptyChart
from fp8scope_dashboard.pages.charts.svg import svg_of
from fp8scope_dashboard.pages.charts.theme import ThemeName, theme_named

logger = logging.getLogger(__name__)

# theme.js sets it to the colours that the page had.
THEME_COOKIE: Final = "fp8scope-theme"
# Characters of an answer that a page brings. A larger one would hold up the page: the script asks for it.
MAX_CHARACTERS: Final = 400_000


@dataclass(frozen=True)
class FirstPaint:
    """A chart as SVG with its description, or only the sentence that says why there is none.

    Attributes:
        answer: the JSON of the figure's address, for an element script; "" if it is not in the page.
        theme: that of the answer.
        query: that of the page's address, of which the chart shows the state.
    """

    svg: SafeString
    text: str
    answer: SafeString = SafeString()
    theme: ThemeName = "light"
    query: str = ""


def first_paint(
    request: HttpRequest, address: str, name: str, axis: str, project: Project | None = None
) -> FirstPaint | None:
    """Draw the figure of an address as the page's address shows it. `project`: that of the page.

    Returns None if the chart cannot be drawn here: the browser then draws it, or says why it cannot.
    """
    parts = urlsplit(address)
    theme = theme_named(request.COOKIES.get(THEME_COOKIE, ""))
    query = figure_query(parts.query, request.GET, name, axis)
    query["theme"] = theme.name
    try:
        chart = figure_at(person(request), parts.path, query, project)
        if isinstance(chart, EmptyChart):
            return FirstPaint(SafeString(), chart.reason)
        if chart is None:
            return None
        script = _for_script(chart)
        svg = svg_of(chart.figure, theme)
    except Exception:
        # A page without its first picture is better than no page.
        logger.exception("The chart %s could not be drawn with its page.", parts.path)
        return None
    if svg is None:
        return None
    # All texts in the picture are escaped.
    picture = mark_safe(svg)  # noqa: S308
    return FirstPaint(picture, chart.summary, script, theme.name, request.META["QUERY_STRING"])


def _for_script(chart: Chart) -> SafeString:
    """The JSON of a chart as the content of an element script, which no text in it can end."""
    text = chart.json()
    if len(text) > MAX_CHARACTERS:
        return SafeString()
    return mark_safe(text.replace("<", "\\u003c"))  # noqa: S308


def figure_query(own: str, page: QueryDict, name: str, axis: str) -> QueryDict:
    """The query of a figure: its own, with the state of the chart from the page's address (see view.js)."""
    query = QueryDict(own, mutable=True)
    for key, value in page.items():
        if key == name or key.startswith(f"{name}."):
            query[key.removeprefix(f"{name}.")] = str(value)
    unit = query.get("x", "step")
    zoom = page.get(axis or f"{name}.range" if unit == "step" else f"{name}.{unit}", "")
    try:
        first, last = (float(bound) for bound in str(zoom).split(".."))
        if unit == "step":
            query["first"], query["last"] = str(math.floor(first)), str(math.ceil(last))
        else:
            query["from"], query["to"] = str(first), str(last)
    except (ValueError, OverflowError):
        # No range, or none that can be read: everything is shown.
        pass
    return query
