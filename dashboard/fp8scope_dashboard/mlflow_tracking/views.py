"""The requests of MLflow's clients: authentication, the endpoint, and errors in MLflow's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt

from fp8scope_dashboard.api.errors import refusal_of
from fp8scope_dashboard.edge.credentials import secret_in
from fp8scope_dashboard.mlflow_tracking import endpoints
from fp8scope_dashboard.mlflow_tracking.errors import MlflowError, of_refusal
from fp8scope_dashboard.mlflow_tracking.fields import Body
from fp8scope_dashboard.wire.errors import NoTokenError

VERSION: Final = "2.22.0"
"""The version of MLflow's protocol. Clients of version 3 then ask for nothing that came later."""
MAX_FIELDS: Final = 10_000


@csrf_exempt
@never_cache
def endpoint(request: HttpRequest, path: str) -> HttpResponse:
    """Answer a request of an MLflow client."""
    return _answered(request, lambda: _answer(request, path))


@csrf_exempt
@never_cache
def no_endpoint(request: HttpRequest, path: str = "") -> HttpResponse:
    """Refuse what is not of MLflow's tracking, such as files and traces, with advice."""

    def refuse() -> dict[str, Any]:
        raise endpoints.absent(request.method or "", path)

    return _answered(request, refuse)


def _answered(request: HttpRequest, answer: Callable[[], dict[str, Any]]) -> HttpResponse:
    try:
        document = answer()
    except Exception as error:
        return _refused(request, error)
    return HttpResponse(json.dumps(document), content_type="application/json")


def home(request: HttpRequest) -> HttpResponse:
    """Lead a browser that follows a link which a client has printed to the pages."""
    return HttpResponseRedirect(reverse("home"))


def version(request: HttpRequest) -> HttpResponse:
    """The version of the protocol, which clients ask for."""
    return HttpResponse(VERSION, content_type="text/plain")


def health(request: HttpRequest) -> HttpResponse:
    """The answer of MLflow's own server."""
    return HttpResponse("OK", content_type="text/plain")


def _answer(request: HttpRequest, path: str) -> dict[str, Any]:
    needs, answer, names = endpoints.listed(request.method or "", path)
    # MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_PASSWORD. It comes before the body: who may not send a request
    # does not learn what is wrong with it.
    secret = secret_in(request.headers.get("Authorization", ""))
    if not secret:
        raise NoTokenError
    request.auth = needs.authenticate(request, secret)  # type: ignore[attr-defined]
    return answer(request, {**_body(request), **names})


def _body(request: HttpRequest) -> Body:
    if request.method == "GET":
        return _query(request.META.get("QUERY_STRING", ""))
    try:
        body = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        raise MlflowError("The body is not JSON.") from None
    if not isinstance(body, dict):
        raise MlflowError("The body is not a JSON object.")
    return body


def _query(query: str) -> Body:
    """The fields of a query; those that come several times are lists."""
    try:
        fields = parse_qs(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise MlflowError(f"The address has more than {MAX_FIELDS} fields.") from None
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


def _refused(request: HttpRequest, error: Exception) -> HttpResponse:
    refused = error
    if not isinstance(refused, MlflowError):
        refused = of_refusal(refusal_of(error, f"{request.method} {request.path[:200]}"))
    answer = HttpResponse(
        json.dumps(refused.document()), status=refused.status, content_type="application/json"
    )
    for name, value in refused.headers.items():
        answer[name] = value
    return answer
