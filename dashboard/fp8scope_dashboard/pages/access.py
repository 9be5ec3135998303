"""Permissions of views, and the context that every page of a project shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, cast
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import Error as DatabaseError
from django.db.models import Count, Max, Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project, Role, User
from fp8scope_dashboard.accounts.permissions import Permission, allows, includes
from fp8scope_dashboard.accounts.services import projects_of, require_project, role_in
from fp8scope_dashboard.alerts.models import Alert, AlertState
from fp8scope_dashboard.alerts.services import alerts_of, numbered
from fp8scope_dashboard.pages.request_reads import reads_of
from fp8scope_dashboard.runs.models import Run

P = ParamSpec("P")
ProjectView = Callable[Concatenate[HttpRequest, Project, P], HttpResponseBase]
PlainView = Callable[Concatenate[HttpRequest, str, P], HttpResponseBase]

# The context of `head_start.html` in pages with the frame.
FRAMED = {"is_framed": True}
# The clocks of the processes that render pages and announce changes may differ by this much.
CLOCK_SECONDS = 0.1
# The most projects in the project menu.
MAX_PROJECTS = 50
# What a view may be asked for: reading, which changes nothing, and forms.
SAFE: Final = ("GET", "HEAD")
POST: Final = ("POST",)


def in_project(
    permission: Permission = permissions.READ, *, methods: Sequence[str] = SAFE, cacheable: bool = False
) -> Callable[[ProjectView[P]], PlainView[P]]:
    """Decorate a view of (request, project, ...) for an address with a project's slug.

    Another method than `methods` gets a 405. Users who are not signed in are redirected to the sign-in page.
    Users who are not members get a 404, and members without the role get a 403. Views check with
    `require_own` what belongs to others. A field with a NUL character gets a 400, because PostgreSQL stores
    none. A run that is deleted meanwhile is a 404, too. Browsers store nothing unless the view is `cacheable`
    and sets a lifetime.
    """

    def decorate(view: ProjectView[P]) -> PlainView[P]:
        @require_http_methods(methods)
        @login_required
        @wraps(view)
        def wrapped(request: HttpRequest, slug: str, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            request.began_at = time.time()  # type: ignore[attr-defined]
            project = require_project(person(request), slug, permission.own)
            if any("\0" in text for fields in (request.GET, request.POST) for text in _texts(fields)):
                raise BadRequest("A field contains a NUL character.")
            with while_runs_exist(project):
                return view(request, project, *args, **kwargs)

        plain: PlainView[P] = wrapped  # type: ignore[assignment]
        return plain if cacheable else never_cache(plain)

    return decorate


def _texts(fields: QueryDict) -> Iterator[str]:
    """The names and the values of an address or a form."""
    for name, values in fields.lists():
        yield name
        yield from map(str, values)


def person(request: HttpRequest) -> User:
    """The signed-in user; only for views behind `login_required`."""
    return cast(User, request.user)


def may(request: HttpRequest, project: Project, permission: Permission) -> bool:
    """Return whether the user may do this to what they made themselves."""
    held = role_in(person(request), project)
    return held is not None and includes(held, permission.own)


def may_for(request: HttpRequest, project: Project, permission: Permission, owner: int | None) -> bool:
    """Return whether the user may do this to what the user with the id `owner` made; None: nobody."""
    return rights_of(request, project)(permission, owner)


def rights_of(request: HttpRequest, project: Project) -> Callable[[Permission, int | None], bool]:
    """`may_for` as a function of the permission and the owner, for many things at once."""
    user = person(request)
    held = role_in(user, project)

    def rights(permission: Permission, owner: int | None) -> bool:
        return allows(permission, held, is_own=owner == user.pk, is_owned=owner is not None)

    return rights


def require_own(request: HttpRequest, project: Project, permission: Permission, owner: int | None) -> None:
    """Check `may_for`.

    Raises:
        PermissionDenied: the user may not; the message says who may.
    """
    if not may_for(request, project, permission, owner):
        raise PermissionDenied(permission.refusal)


def run_of(project: Project, run_id: UUID) -> Run:
    """A run of the project, which a request reads once.

    Raises:
        Http404: there is no such run in it.
    """
    read: dict[UUID, Run] = reads_of(project, "runs")
    if run_id not in read:
        runs = Run.objects.select_related("comparison", "diagnosis", "owner")
        run = runs.filter(project=project, pk=run_id).first()
        if run is None:
            raise Http404("No such run in this project.")
        run.project = project
        read[run_id] = run
    return read[run_id]


@contextmanager
def while_runs_exist(project: Project) -> Iterator[None]:
    """Raise Http404 for whatever fails because a run that the request has read was deleted after that.

    One request makes many queries, and the later ones find nothing or other numbers of rows.
    """
    try:
        yield
    except (Http404, PermissionDenied, BadRequest):
        raise
    except Exception as error:
        read = reads_of(project, "runs")
        with suppress(DatabaseError):
            if read and Run.objects.filter(pk__in=list(read)).count() < len(read):
                raise Http404("The run was deleted meanwhile.") from error
        raise


def page(
    request: HttpRequest,
    project: Project,
    section: str,
    template: str,
    context: dict[str, Any],
    status: int = 200,
) -> HttpResponse:
    """Render a page of a project from its context and the context of the frame."""
    return render(request, template, {**frame(request, project, section), **context}, status=status)


def frame(request: HttpRequest, project: Project, section: str) -> dict[str, Any]:
    """The context of the frame: the project, the user's projects, open alerts and the user's permissions."""
    held = role_in(person(request), project)
    return {
        **FRAMED,
        "project": project,
        "section": section,
        "projects": projects_of(person(request)).filter(archived_at=None).order_by("name")[:MAX_PROJECTS],
        **_alert_numbers(project),
        "changes_since": changes_since(request),
        "is_member": held is not None and includes(held, Role.MEMBER),
        "is_admin": held is not None and includes(held, Role.ADMIN),
    }


def changes_since(request: HttpRequest) -> str:
    """The Unix time in milliseconds, as digits, from which on changes may be missing on the page.

    The page's event stream announces them. All data is read after the request began.
    """
    began = getattr(request, "began_at", None)
    return str(int(1000 * ((time.time() - 60 if began is None else began) - CLOCK_SECONDS)))


def _alert_numbers(project: Project) -> dict[str, int]:
    """The number of open alerts of a project, and the number of its newest alert; see `newest_alert`."""
    opened = Count("id", filter=Q(state=AlertState.OPEN))
    numbers = numbered(alerts_of(project)).aggregate(open_alerts=opened, newest_alert=Max("number"))
    return {"open_alerts": numbers["open_alerts"], "newest_alert": numbers["newest_alert"] or 0}


def open_alerts(project: Project) -> int:
    """The number of open alerts of a project."""
    return _alert_numbers(project)["open_alerts"]


def open_alerts_by_project(projects: Iterable[int]) -> dict[int, int]:
    """The number of open alerts of each project that has any."""
    opened = Alert.objects.filter(
        state=AlertState.OPEN, run__project__in=list(projects), run__deleted_at=None
    ).order_by()
    return dict(opened.values_list("run__project").annotate(Count("id")))


def newest_alert(project: Project) -> int:
    """The number of the project's newest alert, 0 without any. Open pages ask for those after it."""
    return _alert_numbers(project)["newest_alert"]


def back_to(request: HttpRequest, project: Project, default: str) -> HttpResponse:
    """Redirect to the page that contained the form, the field `next`; to `default` without one.

    `next` is user input, so only pages of this project are allowed.
    """
    address = request.POST.get("next", "")
    is_own = address.startswith(reverse("project", args=[project.slug])) and "\\" not in address
    return redirect(address if is_own else default)
