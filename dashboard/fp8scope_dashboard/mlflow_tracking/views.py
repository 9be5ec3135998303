"""The requests of MLflow's clients: authentication, the endpoint, and errors in MLflow's words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt

from fp8scope_dashboard.accounts.models import Project, Scope
from fp8scope_dashboard.api.auth import Token, project_of
from fp8scope_dashboard.api.errors import refusal_of
from fp8scope_dashboard.edge.credentials import secret_in
from fp8scope_dashboard.mlflow_tracking import experiments, metrics, runs, search
from fp8scope_dashboard.mlflow_tracking.errors import NO_ENDPOINT, MlflowError, of_refusal
from fp8scope_dashboard.mlflow_tracking.fields import Body, text
from fp8scope_dashboard.wire.errors import NoTokenError

VERSION: Final = "2.22.0"
"""The version of MLflow's protocol. Clients of version 3 then ask for nothing that came later."""
Endpoint = Callable[[HttpRequest, Body], dict[str, Any]]
WRITES, READS = Token(Scope.WRITE), Token(Scope.READ, own_runs=True)


def _of_project(endpoint: Callable[[Project, Body], dict[str, Any]]) -> Endpoint:
    return lambda request, body: endpoint(project_of(request), body)


def _nothing(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/outputs: models are not recorded; the run must exist."""
    runs.mlflow_run(request, body)
    return {}


def _no_files(request: HttpRequest, body: Body) -> dict[str, Any]:
    """artifacts/list: files do not come here."""
    if ".." in text(body, "path", default="").split("/"):
        raise MlflowError("Invalid path")
    return {"root_uri": runs.document(runs.mlflow_run(request, body))["info"]["artifact_uri"], "files": []}


ENDPOINTS: Final[Mapping[tuple[str, str], tuple[Token, Endpoint]]] = {
    ("POST", "experiments/create"): (WRITES, _of_project(experiments.create)),
    ("GET", "experiments/get"): (READS, _of_project(experiments.get)),
    ("GET", "experiments/get-by-name"): (READS, _of_project(experiments.get_by_name)),
    ("GET", "experiments/search"): (READS, _of_project(experiments.search)),
    ("POST", "experiments/search"): (READS, _of_project(experiments.search)),
    ("POST", "experiments/delete"): (WRITES, _of_project(experiments.delete)),
    ("POST", "experiments/restore"): (WRITES, _of_project(experiments.restore)),
    ("POST", "experiments/update"): (WRITES, _of_project(experiments.rename)),
    ("POST", "experiments/set-experiment-tag"): (WRITES, _of_project(experiments.set_tag)),
    ("POST", "runs/create"): (WRITES, runs.create),
    ("GET", "runs/get"): (READS, runs.get),
    ("POST", "runs/update"): (WRITES, runs.update),
    ("POST", "runs/delete"): (WRITES, runs.delete),
    ("POST", "runs/restore"): (WRITES, runs.restore),
    ("POST", "runs/search"): (READS, search.search),
    ("POST", "runs/log-metric"): (WRITES, metrics.log_metric),
    ("POST", "runs/log-parameter"): (WRITES, runs.log_parameter),
    ("POST", "runs/log-batch"): (WRITES, metrics.log_batch),
    ("POST", "runs/set-tag"): (WRITES, runs.set_tag),
    ("POST", "runs/delete-tag"): (WRITES, runs.delete_tag),
    ("POST", "runs/log-inputs"): (WRITES, runs.log_inputs),
    ("POST", "runs/outputs"): (WRITES, _nothing),
    ("GET", "metrics/get-history"): (READS, metrics.history),
    ("GET", "artifacts/list"): (READS, _no_files),
}


@csrf_exempt
@never_cache
def endpoint(request: HttpRequest, path: str) -> HttpResponse:
    """Answer a request of an MLflow client."""
    try:
        document = _answer(request, path)
    except Exception as error:
        return _refused(request, error)
    return HttpResponse(json.dumps(document), content_type="application/json")


def version(request: HttpRequest) -> HttpResponse:
    """The version of the protocol, which clients ask for."""
    return HttpResponse(VERSION, content_type="text/plain")


def health(request: HttpRequest) -> HttpResponse:
    """The answer of MLflow's own server."""
    return HttpResponse("OK", content_type="text/plain")


def _answer(request: HttpRequest, path: str) -> dict[str, Any]:
    listed = ENDPOINTS.get((request.method or "", path.strip("/")))
    if listed is None:
        raise MlflowError(
            f"No endpoint for {request.method} {path[:100]!r}. docs/mlflow.md lists those that there are.",
            NO_ENDPOINT,
            404,
        )
    needs, answer = listed
    # MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_PASSWORD.
    secret = secret_in(request.headers.get("Authorization", ""))
    if not secret:
        raise NoTokenError
    request.auth = needs.authenticate(request, secret)  # type: ignore[attr-defined]
    return answer(request, _body(request))


def _body(request: HttpRequest) -> Body:
    if request.method == "GET":
        return {name: request.GET[name] for name in request.GET}
    try:
        body = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        raise MlflowError("The body is not JSON.") from None
    if not isinstance(body, dict):
        raise MlflowError("The body is not a JSON object.")
    return body


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
