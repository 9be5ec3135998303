"""The template tag of a chart."""

from __future__ import annotations

from typing import Any

from django import template
from django.template import Context
from django.urls import reverse

from fp8scope_dashboard.pages.charts.first_paint import first_paint
from fp8scope_dashboard.pages.charts.frames import FRAMES, Frame

register = template.Library()


@register.inclusion_tag("pages/charts/_figure.html", takes_context=True)
def figure(
    context: Context,
    name: str,
    address: str,
    *,
    drawn: bool = False,
    frame: Frame | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A chart with its states, its menu and its keyboard access.

    Args:
        name: the element's id; `<form data-controls="NAME">` holds its controls.
        address: where its JSON is, possibly with a query.
        drawn: the page comes with the chart, drawn on the server; for the first chart of a page.
        frame: what surrounds it.
        fields: those of its frame; without any and without a frame, the chart has one in FRAMES.
    """
    if frame is None:
        frame = Frame(**fields) if fields else FRAMES[name]
    note_form = _note_form(context) if frame.marks else ""
    project = context.get("project")
    paint = first_paint(context["request"], address, name, frame.axis, project) if drawn else None
    if paint and paint.svg:
        context["request"].has_first_chart = True
    return {
        "paint": paint,
        "note_form": note_form,
        "name": name,
        "address": address,
        "separator": "&" if "?" in address else "?",
        **vars(frame),
    }


def _note_form(context: Context) -> str:
    """The address of the form of a note at a step of the page's run; empty for who may not write one."""
    run = context.get("run")
    return reverse("step_note", args=[run.project.slug, run.pk]) if run and context.get("is_member") else ""
