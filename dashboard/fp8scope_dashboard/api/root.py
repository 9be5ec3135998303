"""The HTTP API under /api/v1/, and its OpenAPI document at /api/v1/openapi.json."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import HttpError, ValidationError

from fp8scope_dashboard.api.auth import ADMINISTRATOR
from fp8scope_dashboard.api.certificates import router as certificates
from fp8scope_dashboard.api.control import router as control
from fp8scope_dashboard.api.docs_access import private_if_asked
from fp8scope_dashboard.api.errors import refusal_of
from fp8scope_dashboard.api.exports import router as exports
from fp8scope_dashboard.api.ingest import router as ingest
from fp8scope_dashboard.api.media import router as media
from fp8scope_dashboard.api.notes import router as notes
from fp8scope_dashboard.api.projects import router as projects
from fp8scope_dashboard.api.reading import (
    alerts,
    card,
    comparisons,
    course,
    diagnosis,
    figures,
    readiness,
    telemetry,
    tensors,
)
from fp8scope_dashboard.api.reading import runs as run_list
from fp8scope_dashboard.api.rules import router as rules
from fp8scope_dashboard.api.runs import router as runs
from fp8scope_dashboard.api.tokens import router as tokens
from fp8scope_dashboard.wire.errors import InvalidError, MalformedError, RefusalError, error_body
from fp8scope_dashboard.wire.schemas import NO_NUL


class Api(NinjaAPI):
    """The API, whose document says of every text of an address that it has no NUL."""

    def get_openapi_schema(self, **options: Any) -> Any:
        """The OpenAPI document; `options` are those of NinjaAPI."""
        document = super().get_openapi_schema(**options)
        for item in document["paths"].values():
            for operation in item.values():
                for parameter in operation.get("parameters", ()):
                    _without_nul(parameter["schema"])
        return document


def _without_nul(schema: dict[str, Any]) -> None:
    # PostgreSQL stores no such text, and finds none.
    for form in (schema, *schema.get("anyOf", ())):
        if form.get("type") == "string" and not form.keys() & {"enum", "const", "format", "pattern"}:
            form["pattern"] = NO_NUL


api = Api(
    title="fp8scope",
    version=version("fp8scope"),
    description="docs/wire.md describes what training processes send, docs/api.md what programs read.",
    urls_namespace="api",
    auth=ADMINISTRATOR,
    docs_decorator=private_if_asked,
)
api.add_router("", runs)
api.add_router("", certificates)
api.add_router("", ingest)
api.add_router("", media)
api.add_router("", exports)
api.add_router("", control)
api.add_router("", notes)
api.add_router("", rules)
api.add_router("", projects)
api.add_router("", tokens)
for part in (run_list, card, course, telemetry, tensors, diagnosis, readiness, comparisons, alerts, figures):
    api.add_router("", part.router)


def refuse(request: HttpRequest, error: RefusalError) -> HttpResponse:
    answer = api.create_response(request, error.as_dict(), status=error.status)
    for name, value in error.headers().items():
        answer[name] = value
    return answer


@api.exception_handler(Exception)
def on_error(request: HttpRequest, error: Exception) -> HttpResponse:
    return refuse(request, refusal_of(error, f"{request.method} {request.path}"))


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


@api.exception_handler(Http404)
def on_not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    return api.create_response(
        request, error_body("not_found", "Not found.", "See /api/v1/openapi.json."), status=404
    )
