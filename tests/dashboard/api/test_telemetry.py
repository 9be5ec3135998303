"""Reading telemetry over HTTP."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from dashboard.helpers.recorder import Recorder
from dashboard.helpers.token_clients import client_with_token
from django.test import Client

from fp8scope_dashboard.accounts.models import Project

pytestmark = pytest.mark.django_db


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder.of_new_run(["a.input", "b.weight"])
    recorder.send(
        [1, 2, 3],
        {"loss": [3.0, math.nan, math.inf]},
        {"amax": [[1, 10], [2, math.nan], [3, 30]]},
    )
    return recorder


@pytest.fixture
def client() -> Client:
    project = Project.objects.get_or_create(slug="default", name="Default")[0]
    return client_with_token(project)


def test_it_works(recorder: Recorder, client: Client) -> None:
    base = f"/api/v1/runs/{recorder.run.id}"
    answer = client.get(f"{base}/series?tensor=b.weight&statistic=amax")
    assert answer.json() == {"steps": [1, 3], "values": [10.0, 30.0], "thinned": False}
    answer = client.get(f"{base}/series?scalar=loss&first=2")
    assert answer.json() == {"steps": [2, 3], "values": ["NaN", "Infinity"], "thinned": False}
    answer = client.get(f"{base}/heatmap?statistic=amax&columns=3")
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.to_pydict() == {
        "tensor": ["a.input", "b.weight"],
        "values": [[1.0, 2.0, 3.0], [10.0, None, 30.0]],
    }
    assert json.loads(table.schema.metadata[b"step_edges"]) == [1, 2, 3, 4]


def test_a_downsampled_series_keeps_spikes(client: Client) -> None:
    recorder = Recorder.of_new_run(["a"])
    values = np.random.default_rng(0).random(3000)
    values[[100, 101, 2222]] = 9.0
    recorder.send(range(3000), None, {"amax": values[:, None]})
    answer = client.get(f"/api/v1/runs/{recorder.run.id}/series?tensor=a&points=40").json()
    assert len(answer["steps"]) <= 40
    assert {100, 2222} <= set(answer["steps"])


def test_a_run_without_rows_gives_empty_responses(client: Client) -> None:
    run = Recorder.of_new_run(["a"]).run.id
    assert client.get(f"/api/v1/runs/{run}/series", {"tensor": "a"}).json() == {
        "steps": [],
        "values": [],
        "thinned": False,
    }
    answer = client.get(f"/api/v1/runs/{run}/heatmap", {"statistic": "amax"})
    assert pa.ipc.open_stream(answer.content).read_all().num_rows == 0


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("series", {}),
        ("series", {"scalar": "loss", "tensor": "a.input"}),
        ("series", {"scalar": "loss", "points": 7}),
        ("series", {"scalar": "loss", "points": 10**6}),
        ("series", {"scalar": "loss", "first": -1}),
        ("series", {"scalar": "loss", "last": 2**63}),
        ("heatmap", {}),
        ("heatmap", {"statistic": "amax", "columns": 0}),
        ("heatmap", {"statistic": "amax", "columns": 10**6}),
    ],
)
def test_refuses_invalid_queries(
    recorder: Recorder, client: Client, path: str, query: dict[str, str | int]
) -> None:
    answer = client.get(f"/api/v1/runs/{recorder.run.id}/{path}", query)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "invalid"


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("series", {"tensor": "no such"}),
        ("histograms", {"tensor": "no such"}),
        ("tensors/ranking", {"statistic": "none"}),
        ("alerts", {"after": 10**6}),
        ("console", {"before": 10**6}),
        ("figures/none", {}),
    ],
)
def test_a_name_that_is_not_there_is_no_wrong_use(
    recorder: Recorder, client: Client, path: str, query: dict[str, str | int]
) -> None:
    answer = client.get(f"/api/v1/runs/{recorder.run.id}/{path}", query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_name")


@pytest.mark.parametrize("path", ["certificate", "readiness"])
def test_what_was_not_recorded_is_a_conflict(recorder: Recorder, client: Client, path: str) -> None:
    answer = client.get(f"/api/v1/runs/{recorder.run.id}/{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_recorded")


def test_a_run_of_another_project_is_unknown(recorder: Recorder) -> None:
    other = Project.objects.create(slug="other", name="Other")
    client = client_with_token(other)
    for path in ("series?scalar=loss", "heatmap?statistic=amax"):
        assert client.get(f"/api/v1/runs/{recorder.run.id}/{path}").status_code == 404
    assert Client().get(f"/api/v1/runs/{recorder.run.id}/series?scalar=loss").status_code == 401
