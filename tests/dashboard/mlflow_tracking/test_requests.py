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
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.mlflow_tracking.views import ENDPOINTS
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
            {"key": "a", "value": 1, "step": -1},
            "'step' supplied: it must be from 0",
        ),
        (
            "runs/log-metric",
            {"key": "a", "value": 1, "step": 1.5},
            "Invalid value 1.5 for parameter 'step'",
        ),
        (
            "runs/log-metric",
            {"key": "a", "value": 1, "step": 2**63},
            "'step' supplied: it must be from 0",
        ),
        (
            "runs/log-metric",
            {"key": "a", "value": 1, "timestamp": -1},
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
    for method, path in (
        ("get", "runs/create"),
        ("post", "logged-models"),
        ("post", "traces"),
        ("put", "runs/get"),
    ):
        answer = getattr(client, method)(API + path)
        assert (answer.status_code, answer.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND")


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
