"""The template tag of a chart."""

from __future__ import annotations

from typing import Any

from django import template
from django.template import Context

from fp8scope_dashboard.pages.charts.first_paint import first_paint

register = template.Library()


@register.inclusion_tag("pages/charts/_figure.html", takes_context=True)
def figure(
    context: Context,
    name: str,
    address: str,
    *,
    title: str,
    on: str = "",
    axis: str = "",
    size: int = 340,
    zoom: bool = False,
    clickable: bool = False,
    keep: bool = False,
    drawn: bool = False,
) -> dict[str, Any]:
    """A chart with its states, its menu and its keyboard access.

    Args:
        name: the element's id; `<form data-controls="NAME">` holds its controls.
        address: where its JSON is, possibly with a query.
        title: what it shows, for the menu and for saved pictures.
        on: the kinds of changes that refresh it, separated by spaces.
        axis: charts of a page with the same axis share their range and their crosshair; "steps" for steps.
        size: the height in pixels until it is drawn, one of those in figures.css.
        zoom: zooming requests finer data with `first` and `last`.
        clickable: a click on a point does something.
        keep: htmx keeps it when it replaces what is around it.
        drawn: the page comes with the chart, drawn on the server; for the first chart of a page.
    """
    paint = first_paint(context["request"], address, name, axis) if drawn else None
    if paint and paint.svg:
        context["request"].has_first_chart = True
    return {
        "paint": paint,
        "name": name,
        "address": address,
        "separator": "&" if "?" in address else "?",
        "title": title,
        "on": on,
        "axis": axis,
        "size": size,
        "zoom": zoom,
        "clickable": clickable,
        "keep": keep,
    }
