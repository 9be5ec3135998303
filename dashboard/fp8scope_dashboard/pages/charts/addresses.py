"""The addresses of figures: a function that draws one becomes a view, and is found again by its address."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec

from django.http import HttpRequest, HttpResponse, QueryDict
from django.urls import get_script_prefix, resolve
from django.views.decorators.gzip import gzip_page

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.accounts.services import require_project
from fp8scope_dashboard.cold_store.errors import ColdStoreError
from fp8scope_dashboard.pages.access import PlainView, in_project
from fp8scope_dashboard.pages.charts.answers import AnyChart, EmptyChart, answer
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.cold.bodies import explained

P = ParamSpec("P")
DrawFigure = Callable[Concatenate[Project, QueryDict, P], AnyChart]
DrawRunFigure = Callable[[Run, QueryDict, Options], AnyChart]

_drawn_by: dict[Callable[..., Any], DrawFigure[...]] = {}


def figure_view(draw: DrawFigure[P]) -> PlainView[P]:
    """A view for members of a project that answers the figure which `draw` makes of a query."""

    def view(request: HttpRequest, project: Project, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        return answer(request, draw(project, request.GET, *args, **kwargs))

    update_wrapper(view, draw)
    checked: PlainView[P] = gzip_page(in_project()(view))
    _drawn_by[checked] = draw
    return checked


def draw_of(view: Callable[..., Any]) -> DrawFigure[...]:
    """The function that draws the figure of a view which `figure_view` has made."""
    return _drawn_by[view]


def figure_at(user: User, path: str, query: QueryDict, read: Project | None = None) -> AnyChart | None:
    """The figure of an address, for a page that brings it; None if the address has no figure.

    Args:
        path: as `reverse` returns it, so with the prefix below which the server is deployed.
        read: the project of the page, which the user may see.

    Raises:
        Resolver404: there is no such address.
        Http404: the user is not a member of its project, or the project has no such run.
    """
    match = resolve(f"/{path.removeprefix(get_script_prefix())}")
    draw = _drawn_by.get(match.func)
    if draw is None:
        return None
    kwargs = dict(match.kwargs)
    slug = kwargs.pop("slug")
    project = read if read is not None and read.slug == slug else require_project(user, slug)
    try:
        return draw(project, query, *match.args, **kwargs)
    except ColdStoreError as error:
        return EmptyChart(explained(error))
