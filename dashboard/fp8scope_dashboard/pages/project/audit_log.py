"""The whole audit log, for administrators: of a project, or of the server; filtered, and as a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final, cast
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit import queries
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.audit.queries import AuditQuery
from fp8scope_dashboard.exports import streaming
from fp8scope_dashboard.exports.audit_log import FORMS, as_bytes
from fp8scope_dashboard.pages.access import in_project, page, person
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.wire.errors import SlowDownError

ENTRIES_A_PAGE: Final = 100
MAX_NAME: Final = 150
FIELDS: Final = ("by", "action", "first", "last")


@dataclass(frozen=True, kw_only=True)
class AuditSearch:
    """The filter of an address, as it was typed, and the problems with it."""

    query: AuditQuery
    typed: dict[str, str]
    problems: list[str]


@in_project(permissions.READ_AUDIT)
def project_audit(request: HttpRequest, project: Project) -> HttpResponse:
    """The audit log of a project."""
    return page(request, project, "settings", "pages/project/audit_log.html", _context(request, project))


@in_project(permissions.READ_AUDIT)
def project_audit_file(request: HttpRequest, project: Project, form: str) -> HttpResponse:
    """The entries of a project that match, as a file."""
    return _file(request, project, form)


def _of_server(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Decorate a view that only administrators of the server see."""

    def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not person(request).is_superuser:
            raise PermissionDenied("Only server administrators see the audit log of the server.")
        return view(request, *args, **kwargs)

    return cast("Callable[..., HttpResponse]", never_cache(require_safe(login_required(wrapped))))


@_of_server
def server_audit(request: HttpRequest) -> HttpResponse:
    """The audit log of all projects, with sign-ins."""
    context = {"section": "server", **_context(request, None)}
    return render(request, "pages/project/server_audit_log.html", context)


@_of_server
def server_audit_file(request: HttpRequest, form: str) -> HttpResponse:
    """The entries of the server that match, as a file."""
    return _file(request, None, form)


def search_of(request: HttpRequest) -> AuditSearch:
    """The filter of an address. What is not understood is left out, with a sentence."""
    typed = {name: request.GET.get(name, "").strip()[:MAX_NAME] for name in FIELDS}
    problems: list[str] = []
    if typed["action"] not in ("", *Action.values):
        problems.append("There is no such action.")
        typed["action"] = ""
    days = {name: _day(typed[name], problems) for name in ("first", "last")}
    query = AuditQuery(by=typed["by"].replace("\0", ""), action=typed["action"], **days)
    return AuditSearch(query=query, typed=typed, problems=problems)


def _day(text: str, problems: list[str]) -> date | None:
    if not text:
        return None
    try:
        day = date.fromisoformat(text)
        # The first and the last day of the calendar have no day before or after them.
        datetime(day.year, day.month, day.day, tzinfo=UTC)
        if not 1970 <= day.year <= 9000:
            raise ValueError
    except ValueError:
        problems.append(f"“{text}” is no day: write one such as 2026-11-27.")
        return None
    return day


def _context(request: HttpRequest, project: Project | None) -> dict[str, Any]:
    search = search_of(request)
    matching = queries.entries(project, search.query)
    before = whole_number(request.GET.get("before", ""))
    if before is not None:
        matching = matching.filter(pk__lt=before)
    shown = list(matching[: ENTRIES_A_PAGE + 1])
    fields = urlencode({name: text for name, text in search.typed.items() if text})
    has_more = len(shown) > ENTRIES_A_PAGE
    return {
        "entries": shown[:ENTRIES_A_PAGE],
        "typed": search.typed,
        "problems": search.problems,
        "actions": Action.choices,
        "files": [(form, f"{_address(project, form)}?{fields}") for form in FORMS],
        "newest": f"?{fields}" if before is not None else "",
        "older": f"?{fields}&before={shown[ENTRIES_A_PAGE - 1].pk}" if has_more else "",
    }


def _address(project: Project | None, form: str) -> str:
    if project is None:
        return reverse("server_audit_file", args=[form])
    return reverse("project_audit_file", args=[project.slug, form])


def _file(request: HttpRequest, project: Project | None, form: str) -> HttpResponse:
    if form not in FORMS:
        raise Http404("No such format.")
    search = search_of(request)
    if search.problems:
        return HttpResponse(" ".join(search.problems), status=422, content_type="text/plain; charset=utf-8")
    name = f"audit-{'server' if project is None else project.slug}.{form}"
    pieces = queries.in_pieces(queries.entries(project, search.query))
    try:
        answer = streaming.respond_text(as_bytes(pieces, form), name)
    except SlowDownError as error:
        return HttpResponse(f"{error.message} {error.hint}", status=429, headers=error.headers())
    record(actor_of(request), project, Action.EXPORTED, f"the audit log, as {form.upper()}")
    return cast("HttpResponse", answer)
