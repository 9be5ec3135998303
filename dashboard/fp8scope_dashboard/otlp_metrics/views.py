"""The requests of OpenTelemetry's exporters: authentication, decoding, and errors in OTLP's form."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt

from fp8scope_dashboard.accounts.models import Scope
from fp8scope_dashboard.api.auth import Token, project_of
from fp8scope_dashboard.api.errors import refusal_of
from fp8scope_dashboard.edge.credentials import secret_in
from fp8scope_dashboard.otlp_metrics.body import MAX_BYTES, PROTOBUF, kind_of, read_message, refused, success
from fp8scope_dashboard.otlp_metrics.storing import MAX_POINTS, StoringResult, count_points, store_resource
from fp8scope_dashboard.wire.errors import NoTokenError, RefusalError, TooLargeError

WRITES: Final = Token(Scope.WRITE)


class NoEndpointError(RefusalError):
    status, code = 404, "not_found"


class NoMethodError(RefusalError):
    status, code = 405, "method_not_allowed"


@csrf_exempt
@never_cache
def export_metrics(request: HttpRequest) -> HttpResponse:
    """Store the metrics of an exporter."""
    kind = (request.content_type or "").lower()
    try:
        return _export(request)
    except Exception as error:
        refusal = refusal_of(error, f"{request.method} {request.path[:200]}")
        return refused(kind if kind in MAX_BYTES else PROTOBUF, refusal)


@csrf_exempt
@never_cache
def no_endpoint(request: HttpRequest, path: str) -> HttpResponse:
    """Refuse traces, logs and profiles, which are not stored."""
    kind = (request.content_type or "").lower()
    refusal = NoEndpointError(
        f"{path[:40]!r} is not stored here, only metrics are.",
        "Set OTEL_TRACES_EXPORTER=none and OTEL_LOGS_EXPORTER=none, or the endpoint of metrics alone.",
    )
    return refused(kind if kind in MAX_BYTES else PROTOBUF, refusal)


def _export(request: HttpRequest) -> HttpResponse:
    secret = secret_in(request.headers.get("Authorization", ""))
    if not secret:
        raise NoTokenError
    request.auth = WRITES.authenticate(request, secret)  # type: ignore[attr-defined]
    if request.method != "POST":
        raise NoMethodError(f"{request.method} is no method of OTLP.", "Exporters use POST.")
    kind, result = kind_of(request), StoringResult()
    with read_message(request, kind, project_of(request).pk) as message:
        if (count := count_points(message.resource_metrics)) > MAX_POINTS:
            raise TooLargeError(f"The request has {count} data points; at most {MAX_POINTS} are allowed.")
        for resource in message.resource_metrics:
            store_resource(request, resource, result)
    return success(kind, result.rejected, " ".join(result.messages))
