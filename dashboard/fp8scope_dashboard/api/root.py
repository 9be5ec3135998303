"""The HTTP API under /api/v1/, and its OpenAPI document at /api/v1/openapi.json."""

from __future__ import annotations

import logging
from importlib.metadata import version

from django.db import DataError, IntegrityError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import HttpError, ValidationError

from fp8scope_dashboard.api.auth import ADMINISTRATOR
from fp8scope_dashboard.api.control import router as control
from fp8scope_dashboard.api.diagnosis import router as diagnosis
from fp8scope_dashboard.api.exports import router as exports
from fp8scope_dashboard.api.ingest import router as ingest
from fp8scope_dashboard.api.readiness import router as readiness
from fp8scope_dashboard.api.rules import router as rules
from fp8scope_dashboard.api.runs import router as runs
from fp8scope_dashboard.api.telemetry import router as telemetry
from fp8scope_dashboard.runs.services import TooManyWritersError
from fp8scope_dashboard.telemetry.disk_space import is_disk_full
from fp8scope_dashboard.wire.errors import (
    InvalidError,
    MalformedError,
    RefusalError,
    StorageFullError,
    UnavailableError,
    error_body,
)

logger = logging.getLogger(__name__)

api = NinjaAPI(
    title="fp8scope",
    version=version("fp8scope"),
    description="The API for training processes. docs/wire.md describes the protocol.",
    urls_namespace="api",
    auth=ADMINISTRATOR,
)
api.add_router("", runs)
api.add_router("", diagnosis)
api.add_router("", ingest)
api.add_router("", exports)
api.add_router("", control)
api.add_router("", telemetry)
api.add_router("", readiness)
api.add_router("", rules)


@api.exception_handler(RefusalError)
def refuse(request: HttpRequest, error: RefusalError) -> HttpResponse:
    answer = api.create_response(request, error.as_dict(), status=error.status)
    for name, value in error.headers().items():
        answer[name] = value
    return answer


@api.exception_handler(ValidationError)
def on_invalid(request: HttpRequest, error: ValidationError) -> HttpResponse:
    first = error.errors[0]
    # Without the value, which may be long or secret.
    field = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    refusal = InvalidError(f"{field}: {first['msg']}"[:500], "See docs/wire.md or /api/v1/openapi.json.")
    return refuse(request, refusal)


@api.exception_handler(HttpError)
def on_http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    # Raised by django-ninja if a body cannot be parsed.
    return refuse(request, MalformedError(error.message[:500], "Send one JSON object in UTF-8."))


@api.exception_handler(RecursionError)
def on_deep_json(request: HttpRequest, error: RecursionError) -> HttpResponse:
    return refuse(request, MalformedError("The JSON is nested too deeply.", "Send flat objects."))


@api.exception_handler(DataError)
@api.exception_handler(UnicodeEncodeError)
def on_data_error(request: HttpRequest, error: Exception) -> HttpResponse:
    message = "A text or number cannot be stored, such as the character NUL or NaN in config."
    return refuse(request, InvalidError(message, "Remove it, or send it as text."))


@api.exception_handler(TooManyWritersError)
def on_too_many_writers(request: HttpRequest, error: TooManyWritersError) -> HttpResponse:
    return refuse(request, InvalidError("The run has too many writers.", "Use one writer per process."))


@api.exception_handler(OperationalError)
@api.exception_handler(InterfaceError)
@api.exception_handler(IntegrityError)
def on_database_unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    # IntegrityError: the run was deleted meanwhile; the next attempt gets 404.
    logger.error("%s %s: the database failed: %s", request.method, request.path, _first_line(error))
    if is_disk_full(error):
        message = "The disk of the server's database is full."
        return refuse(
            request, StorageFullError(message, "Free space on the server, and keep the message until then.")
        )
    hint = "Wait for the seconds in Retry-After, then send again."
    return refuse(request, UnavailableError("The database is not available.", hint))


@api.exception_handler(Http404)
def on_not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    return api.create_response(
        request, error_body("not_found", "Not found.", "See /api/v1/openapi.json."), status=404
    )


@api.exception_handler(Exception)
def on_bug(request: HttpRequest, error: Exception) -> HttpResponse:
    logger.exception("%s %s failed", request.method, request.path)
    body = error_body("internal", "The server had an internal error.", "Try again; see the server's log.")
    return api.create_response(request, body, status=500)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
