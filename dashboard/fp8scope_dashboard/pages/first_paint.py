"""The chart that a page shows at once: drawn on the server, replaced by plotly when its script has loaded."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from django.http import HttpRequest, QueryDict
from django.utils.safestring import SafeString, mark_safe

from fp8scope_dashboard.pages.figure_requests import answer_of
from fp8scope_dashboard.pages.figures.svg import svg_of
from fp8scope_dashboard.pages.figures.theme import theme_named
from fp8scope_dashboard.pages.views.figure_answers import EmptyAnswer, FigureAnswer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstPaint:
    """A chart as SVG with its description, or only the sentence that says why there is none."""

    svg: SafeString
    text: str


def first_paint(request: HttpRequest, address: str, name: str, axis: str) -> FirstPaint | None:
    """Draw the figure of an address as the page's address shows it.

    Returns None if the chart cannot be drawn here: the browser then draws it, or says why it cannot.
    """
    parts = urlsplit(address)
    try:
        answer = answer_of(request, parts.path, figure_query(parts.query, request.GET, name, axis))
        if isinstance(answer, EmptyAnswer):
            return FirstPaint(SafeString(), answer.reason)
        if not isinstance(answer, FigureAnswer):
            return None
        svg = svg_of(answer.figure, theme_named("light"))
    except Exception:
        # A page without its first picture is better than no page.
        logger.exception("The chart %s could not be drawn with its page.", parts.path)
        return None
    # All texts in the picture are escaped.
    return None if svg is None else FirstPaint(mark_safe(svg), answer.summary)  # noqa: S308


def figure_query(own: str, page: QueryDict, name: str, axis: str) -> QueryDict:
    """The query of a figure: its own, with the state of the chart from the page's address (see view.js)."""
    query = QueryDict(own, mutable=True)
    for key, value in page.items():
        if key == name or key.startswith(f"{name}."):
            query[key.removeprefix(f"{name}.")] = str(value)
    is_over_steps = query.get("x", "step") == "step"
    zoom = page.get(axis or f"{name}.range", "") if is_over_steps else ""
    try:
        first, last = (float(bound) for bound in str(zoom).split(".."))
        query["first"], query["last"] = str(math.floor(first)), str(math.ceil(last))
    except (ValueError, OverflowError):
        # No range, or none that can be read: everything is shown.
        pass
    query["theme"] = "light"
    return query
