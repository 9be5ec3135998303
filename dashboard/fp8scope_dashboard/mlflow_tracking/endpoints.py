"""The endpoints of MLflow that there are, with the token that each needs, and advice for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from django.http import HttpRequest

from fp8scope_dashboard.accounts.models import Project, Scope
from fp8scope_dashboard.api.auth import Token, project_of
from fp8scope_dashboard.mlflow_tracking import experiments, history, logged_models, metrics, runs, search
from fp8scope_dashboard.mlflow_tracking.errors import NO_ENDPOINT, MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import Body, text

Endpoint = Callable[[HttpRequest, Body], dict[str, Any]]
WRITES, READS = Token(Scope.WRITE), Token(Scope.READ, own_runs=True)
MODEL: Final = "logged-models/{model_id}"


def _of_project(endpoint: Callable[[Project, Body], dict[str, Any]]) -> Endpoint:
    return lambda request, body: endpoint(project_of(request), body)


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
    ("POST", "experiments/delete-experiment-tag"): (WRITES, _of_project(experiments.delete_tag)),
    ("POST", "experiments/search-datasets"): (READS, search.search_datasets),
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
    ("POST", "runs/outputs"): (WRITES, runs.log_outputs),
    ("POST", "runs/log-model"): (WRITES, runs.log_model),
    ("GET", "metrics/get-history"): (READS, history.history),
    ("GET", "metrics/get-history-bulk"): (READS, history.history_bulk),
    ("GET", "metrics/get-history-bulk-interval"): (READS, history.history_bulk_interval),
    ("GET", "artifacts/list"): (READS, _no_files),
    ("POST", "logged-models"): (WRITES, logged_models.create),
    ("POST", "logged-models/search"): (READS, logged_models.search),
    ("GET", MODEL): (READS, logged_models.get),
    ("PATCH", MODEL): (WRITES, logged_models.finalize),
    ("DELETE", MODEL): (WRITES, logged_models.delete),
    ("POST", f"{MODEL}/params"): (WRITES, logged_models.log_params),
    ("PATCH", f"{MODEL}/tags"): (WRITES, logged_models.set_tags),
    ("DELETE", f"{MODEL}/tags/{{key}}"): (WRITES, logged_models.delete_tag),
    ("GET", f"{MODEL}/artifacts/directories"): (READS, logged_models.list_files),
}
_NO_REGISTRY: Final = (
    "There is no model registry here. The model itself is logged: leave out registered_model_name, or set "
    "MLFLOW_REGISTRY_URI to an MLflow server that has one."
)
_NO_TRACES: Final = "There are no traces here: call mlflow.tracing.disable(), or trace to another server."
_NO_FILES: Final = (
    "Files do not come here. Create the experiment with an artifact_location such as s3://bucket/path; "
    "without one they stay on the machine that trains."
)
_ADVICE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("registered-models", "model-versions", "prompts", "webhooks"), _NO_REGISTRY),
    **dict.fromkeys(("traces", "assessments", "scorers"), _NO_TRACES),
    **dict.fromkeys(("mlflow-artifacts", "get-artifact", "upload-artifact", "artifacts"), _NO_FILES),
}


def listed(method: str, path: str) -> tuple[Token, Endpoint, dict[str, str]]:
    """The endpoint of a path below api/2.0/mlflow, and what the path itself names.

    Raises:
        MlflowError: there is none; the message says what a script can do.
    """
    names: dict[str, str] = {}
    pattern = path = path.strip("/")
    if (method, path) not in ENDPOINTS and path.startswith("logged-models/"):
        _, names["model_id"], *rest = path.split("/")
        if len(rest) > 1 and rest[0] == "tags":
            names["key"] = "/".join(rest[1:])
            rest = ["tags", "{key}"]
        pattern = "/".join([MODEL, *rest])
    if (method, pattern) not in ENDPOINTS:
        raise absent(method, path)
    return *ENDPOINTS[method, pattern], names


def absent(method: str, path: str) -> MlflowError:
    """The answer where there is no endpoint."""
    words = path.strip("/").split("/")
    sentences = (
        f"No endpoint for {method} {path[:100]!r}.",
        *[_ADVICE[word] for word in words if word in _ADVICE][:1],
        "docs/mlflow.md lists those that there are.",
    )
    return MlflowError(" ".join(sentences), NO_ENDPOINT, 404)
