"""The full-disk banner on every page, and the error pages for requests that fail because of the database."""

from __future__ import annotations

import sys
from typing import Any, Final

import psycopg
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.views.defaults import server_error

from fp8scope_dashboard.telemetry.disk_space import is_disk_full, shows_full

RETRY_SECONDS: Final = 10
# SQLSTATEs of a server that is down, starts, stops, has no connection left, or has ended a long query.
LOST: Final = ("08", "57P", "57014", "53300")


def storage_notice(request: HttpRequest) -> dict[str, Any]:
    """Context processor: whether to warn that the disk is full."""
    return {"disk_is_full": shows_full()}


def on_server_error(request: HttpRequest) -> HttpResponse:
    """Respond to a failed request: 507 if the disk is full, 503 if the database is away, else 500.

    The pages are rendered without the request, whose session may be in the database.
    """
    # Django calls this while it handles the exception and does not pass it.
    error = sys.exc_info()[1]
    if is_disk_full(error):
        return HttpResponse(render_to_string("507.html"), status=507)
    if _is_away(error):
        again = request.get_full_path() if request.method in ("GET", "HEAD") else ""
        answer = HttpResponse(render_to_string("503.html", {"again": again}), status=503)
        answer["Retry-After"] = str(RETRY_SECONDS)
        return answer
    return server_error(request)


def _is_away(error: BaseException | None) -> bool:
    """Return whether there is no connection to the database, rather than a query that it refuses."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and (
            error.sqlstate is None or error.sqlstate.startswith(LOST)
        ):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False
