"""The figures of a run, by name."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from django.http import Http404, QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import run_of
from fp8scope_dashboard.pages.charts.addresses import DrawRunFigure, figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.run.figures import build
from fp8scope_dashboard.pages.tensors import figures as tensor_figures

FIGURES: Final[dict[str, DrawRunFigure]] = {**build.FIGURES, **tensor_figures.FIGURES}


def run_figure(project: Project, query: QueryDict, run_id: UUID, name: str) -> AnyChart:
    """The figure `name` of a run.

    Raises:
        Http404: there is no such run or figure.
    """
    if name not in FIGURES:
        raise Http404("No such figure.")
    return FIGURES[name](run_of(project, run_id), query, Options.of(query))


figure = figure_view(run_figure)
