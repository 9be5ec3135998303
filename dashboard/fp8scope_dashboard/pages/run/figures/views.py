"""The address of a run's figures: JSON built here, drawn by plotly in the browser."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.gzip import gzip_page

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import in_project, run_of
from fp8scope_dashboard.pages.charts.answers import Builder
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.run.figures import build
from fp8scope_dashboard.pages.tensors import figures as tensor_figures

BUILDERS: Final[dict[str, Builder]] = {**build.BUILDERS, **tensor_figures.BUILDERS}


@gzip_page
@in_project()
def figure(request: HttpRequest, project: Project, run_id: UUID, name: str) -> HttpResponse:
    """The figure `name` of a run."""
    if name not in BUILDERS:
        raise Http404("No such figure.")
    return BUILDERS[name](request, run_of(project, run_id), Options.of(request.GET))
