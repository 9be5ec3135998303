"""Who may see a page, and what every page of a project has in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.cache import never_cache

from fp8scope_dashboard.accounts.models import Project, Role, User
from fp8scope_dashboard.accounts.services import projects_of, require_project, role_in
from fp8scope_dashboard.alerts.models import Event, EventState
from fp8scope_dashboard.runs.models import Run

P = ParamSpec("P")
ProjectView = Callable[Concatenate[HttpRequest, Project, P], HttpResponseBase]
PlainView = Callable[Concatenate[HttpRequest, str, P], HttpResponseBase]

# Projects that the switcher names.
MOST_PROJECTS = 50
_ORDER = (Role.VIEWER, Role.MEMBER, Role.ADMIN)


def in_project(
    role: Role = Role.VIEWER, *, cacheable: bool = False
) -> Callable[[ProjectView[P]], PlainView[P]]:
    """Make a view of (request, project, ...) out of an address with a slug.

    Who is not signed in is sent to sign in; who is not a member gets a 404; who may not do it, a 403.
    The browser keeps nothing, unless the view is `cacheable` and says for how long.
    """

    def decorate(view: ProjectView[P]) -> PlainView[P]:
        @login_required
        @wraps(view)
        def wrapped(request: HttpRequest, slug: str, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            return view(request, require_project(person(request), slug, role), *args, **kwargs)

        plain: PlainView[P] = wrapped  # type: ignore[assignment]
        return plain if cacheable else never_cache(plain)

    return decorate


def person(request: HttpRequest) -> User:
    """Who is signed in; only behind `login_required`."""
    return cast(User, request.user)


def may(request: HttpRequest, project: Project, role: Role) -> bool:
    """Whether the person has at least this role in the project."""
    held = role_in(person(request), project)
    return held is not None and _ORDER.index(held) >= _ORDER.index(role)


def run_of(project: Project, run_id: UUID) -> Run:
    """A run of the project.

    Raises:
        Http404: there is no such run in it.
    """
    run = Run.objects.select_related("project", "comparison").filter(project=project, pk=run_id).first()
    if run is None:
        raise Http404("No such run in this project.")
    return run


def page(
    request: HttpRequest,
    project: Project,
    section: str,
    template: str,
    context: dict[str, Any],
    status: int = 200,
) -> HttpResponse:
    """Render a page of a project: its own context and what the frame around it shows."""
    return render(request, template, {**frame(request, project, section), **context}, status=status)


def frame(request: HttpRequest, project: Project, section: str) -> dict[str, Any]:
    """What the frame of every page shows: the project, its siblings, open alerts, what the person may do."""
    return {
        "project": project,
        "section": section,
        "projects": projects_of(person(request)).order_by("name")[:MOST_PROJECTS],
        "open_alerts": open_alerts(project),
        "is_member": may(request, project, Role.MEMBER),
        "is_admin": may(request, project, Role.ADMIN),
    }


def open_alerts(project: Project) -> int:
    """How many alerts wait for somebody."""
    return Event.objects.filter(run__project=project, state=EventState.OPEN).count()
