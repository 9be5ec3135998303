"""The template tag of a chart."""

from __future__ import annotations

from typing import Any

from django import template
from django.template import Context

from fp8scope_dashboard.pages.charts.first_paint import first_paint
from fp8scope_dashboard.pages.charts.frames import FRAMES, Frame

register = template.Library()


@register.inclusion_tag("pages/charts/_figure.html", takes_context=True)
def figure(
    context: Context, name: str, address: str, *, drawn: bool = False, **fields: Any
) -> dict[str, Any]:
    """A chart with its states, its menu and its keyboard access.

    Args:
        name: the element's id; `<form data-controls="NAME">` holds its controls.
        address: where its JSON is, possibly with a query.
        drawn: the page comes with the chart, drawn on the server; for the first chart of a page.
        fields: those of its frame; without any, the chart has a frame in FRAMES.
    """
    frame = Frame(**fields) if fields else FRAMES[name]
    paint = first_paint(context["request"], address, name, frame.axis) if drawn else None
    if paint and paint.svg:
        context["request"].has_first_chart = True
    return {
        "paint": paint,
        "name": name,
        "address": address,
        "separator": "&" if "?" in address else "?",
        **vars(frame),
    }
