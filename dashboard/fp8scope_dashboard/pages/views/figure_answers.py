"""The answers of figures: a figure as JSON, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable

import plotly.graph_objects as go
from django.http import HttpRequest, HttpResponse

from fp8scope_dashboard.pages.series_loading import Options
from fp8scope_dashboard.runs.models import Run

Builder = Callable[[HttpRequest, Run, Options], HttpResponse]


def figure_answer(figure: go.Figure, summary: str) -> HttpResponse:
    """A figure with a one-sentence description for screen readers."""
    body = f'{{"figure":{figure.to_json(validate=False)},"summary":{json.dumps(summary)}}}'
    return HttpResponse(body, content_type="application/json")


def empty_answer(text: str) -> HttpResponse:
    """A text that says why there is no figure and how to get one."""
    return HttpResponse(json.dumps({"empty": text}), content_type="application/json")
