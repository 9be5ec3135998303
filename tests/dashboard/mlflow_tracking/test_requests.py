"""Requests to /mlflow that no regular client sends: refused in MLflow's words, and nothing is stored."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.token_clients import client_with_token
from django.test import Client
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project, Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.mlflow_tracking.endpoints import ENDPOINTS
from fp8scope_dashboard.mlflow_tracking.models import MlflowExperiment, MlflowRun
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.services import mark_silent

API = "/mlflow/api/2.0/mlflow/"
NOW = 1_790_000_000_000


LARGE = [
    {"dataset": {"name": str(number), "digest": "a", "source_type": "local", "source": "s" * 16_000}}
    for number in range(17)
]


@pytest.fixture
def client(project: Project) -> Client:
    return client_with_token(project)


def post(client: Client, path: str, **body: Any) -> Any:
    return client.post(API + path, json.dumps(body), content_type="application/json")


def created(client: Client) -> str:
    run_id: str = post(client, "runs/create").json()["run"]["info"]["run_id"]
    return run_id


def test_it_works(client: Client) -> None:
    run_id = created(client)
    answer = post(
        client, "runs/log-metric", run_id=run_id, key="loss", value="NaN", timestamp=str(NOW), step="3"
    )
    assert (answer.status_code, answer.json()) == (200, {})
    document = client.get(f"{API}runs/get?run_id={run_id}").json()["run"]
    assert document["data"]["metrics"] == [{"key": "loss", "value": "NaN", "timestamp": NOW, "step": 3}]
    assert (
        client.get("/mlflow/version").content == b"2.22.0" and client.get("/mlflow/health").content == b"OK"
    )


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("runs/log-metric", {}, "parameter 'key'"),
        (
            "runs/log-metric",
            {"key": "a", "value": "b"},
            "it must be a number",
        ),
        (
            "runs/log-metric",
            {"key": "a", "value": True},
            "it must be a number",
        ),
        ("runs/log-metric", {"key": "a" * 251, "value": 1}, "at most 250"),
        ("runs/log-metric", {"key": "a\0", "value": 1}, "NUL"),
        ("runs/log-metric", {"key": 3, "value": 1}, "must be a text"),
        (
            "runs/log-metric",
            {"key": "a", "value": 1, "step": 1.5},
            "Invalid value 1.5 for parameter 'step'",
        ),
        (
            "runs/log-metric",
            {"key": "a", "value": 1, "step": 2**63},
            "'step' supplied: it must be from -",
        ),
        (
            "runs/log-metric",
            {"key": "a", "value": 1, "timestamp": "noon"},
            "'timestamp' supplied",
        ),
        ("runs/log-batch", {"metrics": {}}, ""),
        ("runs/log-batch", {"metrics": [3]}, "list of objects"),
        ("runs/log-batch", {"metrics": [{"key": "a", "value": 1}] * 1_001}, "at most 1000"),
        ("runs/log-batch", {"params": [{"key": "a", "value": "x" * 6_001}]}, "at most 6000"),
        ("runs/log-parameter", {"key": "a", "value": 3}, "must be a text"),
        ("runs/update", {"status": "GREAT"}, "'status' is 'GREAT'"),
        ("runs/update", {"status": "FINISHED", "end_time": 2**61}, "is none in milliseconds"),
        (
            "runs/set-tag",
            {"key": "fp8scope.seed", "value": "x"},
            "'seed' supplied: it must be",
        ),
        ("runs/delete-tag", {"key": "missing"}, "No tag with name: missing"),
        ("runs/search", {"experiment_ids": ["x"]}, "Experiment 'x' not found"),
        ("runs/search", {"experiment_ids": "0"}, "must be a list"),
        ("runs/log-inputs", {}, "Missing value for required parameter 'run_id'"),
        ("runs/log-inputs", {"models": []}, "Missing value for required parameter 'datasets'"),
        ("runs/log-inputs", {"datasets": [{}]}, "Missing value for required parameter 'dataset'"),
        ("runs/log-inputs", {"datasets": [{"dataset": {"name": "a"}}]}, "parameter 'digest'"),
        ("runs/log-inputs", {"datasets": [{}] * 101}, "at most 100"),
        ("runs/log-inputs", {"datasets": LARGE}, "at most 262144 characters together"),
        ("experiments/search", {"filter": "metrics.loss > 1"}, "Invalid entity type 'metrics'"),
        ("experiments/search", {"filter": "status = 'a'"}, "Invalid attribute 'status'"),
        ("experiments/search", {"order_by": ["params.a"]}, "Invalid entity type 'params'"),
        ("experiments/create", {"name": "a", "artifact_location": 9.0}, "Invalid value 9.0 for parameter"),
        ("runs/search", {"order_by": ["; drop"]}, "Invalid order_by"),
        ("runs/search", {"filter": "start_time LIKE '1%'"}, "'start_time' is a number"),
        ("runs/outputs", {"models": [{}]}, "parameter 'model_id'"),
        ("runs/log-model", {"model_json": "3"}, "'model_json' is no JSON object"),
        ("experiments/delete-experiment-tag", {"experiment_id": "0", "key": "a"}, "No tag with name: a"),
        ("experiments/search-datasets", {}, "must specify at least one experiment_id"),
        ("experiments/search-datasets", {"experiment_ids": ["0"] * 21}, "cannot specify more than 20"),
        ("logged-models", {"experiment_id": "7"}, "Experiment '7' not found"),
        ("logged-models/search", {"filter": "metrics.a > 1"}, "Invalid entity type 'metrics'"),
        ("logged-models/m-1/params", {}, "Logged model with ID 'm-1' not found"),
    ],
)
def test_wrong_values_are_refused_and_change_nothing(
    client: Client, path: str, body: dict[str, Any], message: str
) -> None:
    run_id = created(client)
    before = MlflowRun.objects.values().get(pk=uuid.UUID(run_id))
    names = {"run_id": run_id} if body and not path.endswith("search") else {}
    answer = post(client, path, **names, **body)
    if message:
        assert answer.status_code in (400, 404) and message in answer.json()["message"], answer.content
        assert set(answer.json()) == {"error_code", "message"}
    assert MlflowRun.objects.values().get(pk=uuid.UUID(run_id)) == before
    assert Run.objects.get(pk=run_id).rows_stored == 0


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"\xff", b"[" * 10_000, b'{"a": NaN}'])
def test_bodies_that_are_none(client: Client, raw: bytes) -> None:
    answer = client.post(f"{API}runs/log-batch", raw, content_type="application/json")
    assert answer.status_code == 400 and answer.json()["error_code"] == "INVALID_PARAMETER_VALUE"


def test_endpoints_that_there_are_not(client: Client) -> None:
    for method, path, advice in (
        ("get", f"{API}runs/create", "docs/mlflow.md"),
        ("put", f"{API}runs/get", "docs/mlflow.md"),
        ("patch", f"{API}logged-models", "docs/mlflow.md"),
        ("post", f"{API}registered-models/create", "leave out registered_model_name"),
        ("post", f"{API}traces", "mlflow.tracing.disable()"),
        ("put", "/mlflow/api/2.0/mlflow-artifacts/artifacts/0/a.txt", "artifact_location"),
        ("post", "/mlflow/api/3.0/mlflow/traces", "mlflow.tracing.disable()"),
        ("post", "/mlflow/v1/traces", "mlflow.tracing.disable()"),
        ("get", "/mlflow/get-artifact", "artifact_location"),
        ("post", "/mlflow/graphql", "docs/mlflow.md"),
    ):
        answer = getattr(client, method)(path)
        assert (answer.status_code, answer.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND"), path
        assert advice in answer.json()["message"], path


def test_runs_of_others_are_missing(client: Client, project: Project) -> None:
    run_id = created(client)
    own = make_run(project, "of the agent")
    elsewhere = client_with_token(create_project("elsewhere", "Elsewhere"))
    for path, body in (
        ("runs/log-metric", {"key": "a", "value": 1}),
        ("runs/log-parameter", {"key": "a", "value": "1"}),
        ("runs/set-tag", {"key": "a", "value": "1"}),
        ("runs/update", {"status": "FINISHED"}),
        ("runs/delete", {}),
        ("runs/log-batch", {}),
    ):
        assert post(elsewhere, path, run_id=run_id, **body).status_code == 404, path
        # A run of an agent is not written by MLflow's client.
        assert post(client, path, run_id=own.pk.hex, **body).status_code == 404, path
        assert post(client, path, run_id="no id", **body).status_code == 404, path
    assert elsewhere.get(f"{API}runs/get?run_id={run_id}").status_code == 404
    assert post(elsewhere, "runs/search", experiment_ids=["0"]).json()["runs"] == []


def test_scopes(project: Project) -> None:
    writing, reading = client_with_token(project, Scope.WRITE), client_with_token(project, Scope.READ)
    run_id = created(writing)
    assert post(reading, "runs/create").status_code == 403
    assert post(reading, "runs/log-metric", run_id=run_id, key="a", value=1).status_code == 403
    assert reading.get(f"{API}runs/get?run_id={run_id}").status_code == 200
    # A token that only writes reads what it has registered.
    assert writing.get(f"{API}runs/get?run_id={run_id}").status_code == 200
    other = client_with_token(project, Scope.WRITE)
    assert other.get(f"{API}runs/get?run_id={run_id}").status_code == 403
    assert post(other, "runs/search", experiment_ids=["0"]).json()["runs"] == []
    assert len(post(writing, "runs/search", experiment_ids=["0"]).json()["runs"]) == 1
    for method, path in ENDPOINTS:
        answer = getattr(Client(), method.lower())(API + path)
        assert (answer.status_code, answer.json()["error_code"]) == (401, "UNAUTHENTICATED"), path


def test_the_token_comes_before_the_body(client: Client) -> None:
    """Who may not send a request does not learn what is wrong with it."""
    assert Client().post(f"{API}runs/log-batch", b"{", content_type="application/json").status_code == 401
    assert client.post(f"{API}runs/log-batch", b"{", content_type="application/json").status_code == 400


def test_the_names_of_older_clients(client: Client) -> None:
    run_id = created(client)
    answer = post(client, "runs/log-metric", run_uuid=run_id, key="loss", value=1, timestamp=NOW, step=1)
    assert answer.status_code == 200
    for path in (f"{API}runs/get", "/mlflow/ajax-api/2.0/mlflow/runs/get"):
        assert client.get(path, {"run_uuid": run_id}).json()["run"]["info"]["run_uuid"] == run_id


def test_links_that_clients_print_lead_to_the_pages() -> None:
    assert Client().get("/mlflow/").headers["Location"] == "/"


def test_many_fields_of_an_address(client: Client) -> None:
    ids = "&".join(f"run_id={number}" for number in range(1_200))
    answer = client.get(f"{API}metrics/get-history-bulk?metric_key=a&{ids}")
    assert answer.status_code == 400 and "more than 100 run_ids" in answer.json()["message"]
    answer = client.get(f"{API}runs/get?{'&a=1' * 10_001}")
    assert answer.status_code == 400 and "more than 10000 fields" in answer.json()["message"]


def test_a_run_that_a_person_archived_goes_on(client: Client) -> None:
    """Only what a client of MLflow has deleted takes no more values."""
    run_id = created(client)
    value = {"run_id": run_id, "key": "loss", "value": 1, "timestamp": NOW}
    Run.objects.filter(pk=run_id).update(archived_at=timezone.now())
    assert post(client, "runs/log-metric", **value).status_code == 200
    post(client, "runs/delete", run_id=run_id)
    refused = post(client, "runs/log-metric", **value)
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    Run.objects.filter(pk=run_id).update(archived_at=None)
    assert post(client, "runs/log-metric", **value).status_code == 200


def test_models_of_others_are_missing(client: Client, project: Project) -> None:
    model_id = post(client, "logged-models").json()["model"]["info"]["model_id"]
    assert client.get(f"{API}logged-models/{model_id}").status_code == 200
    for path in (f"logged-models/{model_id}", f"logged-models/{model_id}/artifacts/directories"):
        assert client_with_token(project, Scope.READ).get(API + path).status_code == 200
        assert client_with_token(project, Scope.WRITE).get(API + path).status_code == 403
        elsewhere = client_with_token(create_project(f"elsewhere-{len(path)}", "Elsewhere"))
        assert elsewhere.get(API + path).status_code == 404
    other = client_with_token(project, Scope.WRITE)
    assert post(other, "logged-models/search", experiment_ids=["0"]).json()["models"] == []
    assert len(post(client, "logged-models/search", experiment_ids=["0"]).json()["models"]) == 1


def test_descriptions_of_models_of_older_clients(client: Client) -> None:
    """Clients of version 2 add them to a tag; the oldest give way where it is full."""
    run_id = created(client)
    post(client, "runs/set-tag", run_id=run_id, key="mlflow.log-model.history", value="no JSON")
    for number in range(4):
        described = json.dumps({"artifact_path": f"model {number}", "text": "x" * 3_000})
        assert post(client, "runs/log-model", run_id=run_id, model_json=described).status_code == 200
    history = json.loads(MlflowRun.objects.get(pk=uuid.UUID(run_id)).tags["mlflow.log-model.history"])
    assert [model["artifact_path"] for model in history] == ["model 2", "model 3"]


def test_values_keep_their_times(client: Client) -> None:
    """Of a step with several times, and of times that the store does not have."""
    run_id = created(client)
    times = {"early": 789, "late": NOW, "nanoseconds": NOW * 10**6, "before 1970": -5}
    metrics = [
        {"key": key, "value": 1, "timestamp": timestamp, "step": -3} for key, timestamp in times.items()
    ]
    assert post(client, "runs/log-batch", run_id=run_id, metrics=metrics).status_code == 200
    stored = client.get(f"{API}runs/get?run_id={run_id}").json()["run"]["data"]["metrics"]
    assert {metric["key"]: metric["timestamp"] for metric in stored} == times
    bounds = {"nanoseconds": 7_258_118_400_000, "before 1970": 0}
    for key, timestamp in times.items():
        (point,) = client.get(f"{API}metrics/get-history", {"run_id": run_id, "metric_key": key}).json()[
            "metrics"
        ]
        assert (point["timestamp"], point["step"]) == (bounds.get(key, timestamp), 0)


def test_searches_read_no_more_than_a_page(
    client: Client, project: Project, django_assert_num_queries: Any
) -> None:
    """Filter, order and page are SQL: the number of statements depends on nothing else."""
    many = [MlflowExperiment(project=project, name=f"e{number}", tags={"3": "x"}) for number in range(300)]
    MlflowExperiment.objects.bulk_create(many)
    names = [experiment.name for experiment in many]
    search = {"filter": "tags.`3` = 'x' AND name LIKE 'e%'", "order_by": ["name DESC"], "max_results": 7}
    post(client, "experiments/search")
    with django_assert_num_queries(2):
        page = post(client, "experiments/search", **search).json()
    assert [experiment["name"] for experiment in page["experiments"]] == sorted(names, reverse=True)[:7]
    page = post(client, "experiments/search", **search, page_token="294").json()
    assert [experiment["name"] for experiment in page["experiments"]] == sorted(names)[5::-1]
    assert "next_page_token" not in page
    ids = [str(experiment.pk) for experiment in many]
    with django_assert_num_queries(2):
        assert post(client, "runs/search", experiment_ids=ids).json()["runs"] == []


def test_a_page_of_large_texts_ends_early(client: Client, project: Project) -> None:
    tags = {str(number): "x" * 8_000 for number in range(100)}
    many = [MlflowExperiment(project=project, name=f"e{number}", tags=tags) for number in range(25)]
    MlflowExperiment.objects.bulk_create(many)
    names, token = [], ""
    while token is not None:
        page = post(client, "experiments/search", page_token=token).json()
        names += [experiment["name"] for experiment in page["experiments"]]
        assert len(page["experiments"]) <= 21
        token = page.get("next_page_token")
    assert sorted(names) == sorted([*(f"e{number}" for number in range(25)), "Default"])


def test_names_that_no_scalar_has(client: Client) -> None:
    run_id = created(client)
    for key in ("val acc", "val:acc", "val_acc", "ä" * 200, "ä" * 201):
        assert (
            post(client, "runs/log-metric", run_id=run_id, key=key, value=1, timestamp=NOW).status_code == 200
        )
    scalars = Run.objects.get(pk=run_id).last_scalars
    assert len(scalars) == 5 and {"val_acc"} < set(scalars) and max(map(len, scalars)) == 128
    keys = {
        entry["key"]
        for entry in client.get(f"{API}runs/get?run_id={run_id}").json()["run"]["data"]["metrics"]
    }
    assert keys == {"val acc", "val:acc", "val_acc", "ä" * 200, "ä" * 201}


def test_the_first_training_loss_is_the_loss(client: Client) -> None:
    run_id = created(client)
    for key, value in (("eval_loss", 9.0), ("train/loss", 2.0), ("train_loss", 3.0)):
        post(client, "runs/log-metric", run_id=run_id, key=key, value=value, timestamp=NOW, step=1)
    assert Run.objects.get(pk=run_id).last_scalars["loss"] == 2.0
    post(client, "runs/log-metric", run_id=run_id, key="loss", value=4.0, timestamp=NOW, step=2)
    post(client, "runs/log-metric", run_id=run_id, key="train/loss", value=5.0, timestamp=NOW, step=2)
    assert Run.objects.get(pk=run_id).last_scalars["loss"] == 4.0


def test_a_run_without_heartbeats_is_not_silent_at_once(client: Client, project: Project) -> None:
    run_id = created(client)
    agent = make_run(project, "of the agent")
    for minutes, states in ((10, ("running", "silent")), (61, ("silent", "silent"))):
        Run.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=minutes))
        mark_silent()
        assert (Run.objects.get(pk=run_id).state, Run.objects.get(pk=agent.pk).state) == states


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    (
        *("run_id", "key", "value", "timestamp", "step", "metrics", "params", "tags", "status", "end_time"),
        *("experiment_id", "name", "run_name", "start_time", "filter", "order_by", "experiment_ids"),
        *("max_results", "page_token", "metric_key", "user_id", "run_view_type", "view_type", "new_name"),
        *("model_id", "models", "datasets", "run_ids", "start_step", "end_step", "model_json"),
    )
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    endpoint=st.sampled_from(sorted(ENDPOINTS)),
    body=st.dictionaries(FIELDS, VALUES, max_size=6),
    is_run=st.booleans(),
)
def test_no_request_is_an_error_of_the_server(
    client: Client, endpoint: tuple[str, str], body: dict[str, Any], is_run: bool
) -> None:
    method, path = endpoint
    if is_run:
        body = {**body, "run_id": created(client)}
    if method == "GET":
        answer = client.get(API + path, {name: str(value).replace("\0", "") for name, value in body.items()})
    else:
        answer = post(client, path, **body)
    assert answer.status_code < 500, answer.content
    assert answer.status_code == 200 or set(answer.json()) == {"error_code", "message"}
