"""A complete run over HTTP: register, send the catalogue and batches, finish, query."""

from __future__ import annotations

import math
import uuid

import numpy as np
import pytest
from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer
from fp8scope_dashboard.telemetry import queries

NAMES = ["blocks.0.up.input", "blocks.0.up.weight"]


@pytest.fixture
def client(server: Server) -> WireClient:
    return WireClient(server.url, server.token)


def test_it_works(client: WireClient) -> None:
    registered = client.register(precision="fp8", group="fp8", baseline="bf16", seed=3, total_steps=10)
    assert registered.status == 201
    assert registered.json == {
        "id": str(client.run),
        "project": "default",
        "url": f"{client.url}/p/default/runs/{client.run}/",
        "state": "running",
        "accepts": ["console", "evaluation_matrix", "past_note", "past_artefact", "media"],
        "margin": 0.0025,
    }
    assert client.catalogue(NAMES).json == {"count": 2}
    body = client.batch(
        0,
        [1, 2, 3],
        scalars={"loss": [2.5, math.nan, math.inf], "tokens": [10.0, None, 30.0]},
        tensors={"amax": [[1.0, 2.0], [3.0, None], [5.0, 6.0]], "saturated": [[0, 1], [0, 1], [0, 9]]},
        metadata={"fp8scope.dropped": "4"},
    )
    sent = client.send(body)
    answer = sent.json
    assert 0.0 < answer.pop("pause") <= 5.0
    assert (sent.status, answer) == (
        201,
        {"status": "stored", "seq": 0, "rows": 3, "points": 5 + 5 + 6, "alerts": [], "commands": []},
    )
    scores = {"writer": str(client.writer), "seq": 1, "step": 3, "name": "heldout", "metric": "accuracy"}
    scores |= {"kind": "proportion", "items": [1, 0, 1], "item_ids": ["a", "b", "c"]}
    assert client.request("POST", "/evaluations", json=scores).json["status"] == "stored"
    finish = {
        "writer": str(client.writer),
        "seq": 2,
        "rows_sent": 3,
        "points_sent": 16,
        "dropped": 4,
        "errors": 1,
    }
    assert client.request("POST", "/finish", json=finish).json["status"] == "stored"

    stored = client.request("GET").json
    expected: dict[str, object] = {
        "rows_stored": 3,
        "points_stored": 16,
        "rows_sent": 3,
        "points_sent": 16,
        "rows_dropped": 4,
    }
    expected |= {"agent_errors": 1, "last_step": 3, "state": "finished", "baseline": "bf16", "group": "fp8"}
    assert {key: stored[key] for key in expected} == expected
    loss = queries.scalar(client.run, "loss")
    np.testing.assert_array_equal(loss.values, [2.5, math.nan, math.inf])
    np.testing.assert_array_equal(loss.steps, [1, 2, 3])
    amax = queries.tensor_series(client.run, 1, "amax")
    assert (amax.steps.tolist(), amax.values.tolist()) == ([1, 3], [2.0, 6.0])
    assert Evaluation.objects.get().items == [1.0, 0.0, 1.0]
    run = Run.objects.get()
    assert run.last_scalars == {"loss": "Infinity", "tokens": 30.0}
    assert (run.statistics, run.seed, run.finished_at is not None) == (["amax", "saturated"], 3, True)


def test_accepts_batches_as_json(client: WireClient) -> None:
    client.register()
    client.catalogue(NAMES)
    rows = [
        {
            "step": 7,
            "time": "2026-01-01T01:00:00+01:00",
            "scalars": {"loss": "NaN", "tokens": None, "grad_norm": 3},
            "tensors": {"amax": {NAMES[1]: 3.5}, "scale": {NAMES[0]: "Infinity", NAMES[1]: None}},
        }
    ]
    body = {"protocol": 1, "writer": str(client.writer), "seq": 0, "rows": rows}
    answer = client.request("POST", "/batches", json=body)
    assert (answer.status, answer.json["points"]) == (201, 4)
    assert math.isnan(queries.scalar(client.run, "loss").values[0])
    assert queries.scalar(client.run, "loss").times[0] == np.datetime64("2026-01-01T00:00:00")
    assert queries.tensor_series(client.run, 1, "amax").values.tolist() == [3.5]
    assert queries.tensor_series(client.run, 0, "scale").values.tolist() == [math.inf]
    assert len(queries.tensor_series(client.run, 0, "amax")) == 0
    assert client.request("POST", "/batches", json=body).json["status"] == "duplicate"


def test_registering_again_changes_nothing(client: WireClient) -> None:
    assert client.register(seed=1).status == 201
    again = client.register(seed=2)
    assert (again.status, again.json["id"]) == (200, str(client.run))
    assert Run.objects.get().seed == 1


def test_a_catalogue_grows_and_may_be_sent_again(client: WireClient) -> None:
    client.register()
    assert client.catalogue(NAMES[:1]).json == {"count": 1}
    assert client.catalogue(NAMES).json == {"count": 2}
    assert client.catalogue(NAMES[1:], offset=1).json == {"count": 2}
    assert client.catalogue([], offset=0, rank=3, hostname="node7").json == {"count": 2}
    writer = Writer.objects.get()
    assert (writer.catalogue, writer.rank, writer.hostname) == ([0, 1], 3, "node7")
    assert list(Tensor.objects.values_list("name", flat=True)) == NAMES


def test_each_writer_numbers_tensors_in_its_own_order(client: WireClient) -> None:
    other = WireClient(client.url, client.token, run=client.run)
    client.register()
    client.catalogue(NAMES, rank=0)
    other.catalogue([*NAMES[::-1], "blocks.1.up.input"], rank=1)
    assert Writer.objects.get(uuid=other.writer).catalogue == [1, 0, 2]
    assert (
        client.send(client.batch(0, [5], tensors={"amax": [[1.0, 20.0]], "numel": [[8.0, 8.0]]})).status
        == 201
    )
    assert (
        other.send(other.batch(0, [5], tensors={"amax": [[2.0, 10.0, 7.0]], "numel": [[8.0] * 3]})).status
        == 201
    )
    amax = [queries.tensor_series(client.run, i, "amax").values.tolist() for i in range(3)]
    numel = [queries.tensor_series(client.run, i, "numel").values.tolist() for i in range(3)]
    assert (amax, numel) == ([[10.0], [20.0], [7.0]], [[16.0], [16.0], [8.0]])


def test_a_heartbeat_keeps_a_run_alive(client: WireClient) -> None:
    client.register()
    Run.objects.update(state=RunState.SILENT)
    body = {"writer": str(client.writer), "dropped": 2, "errors": 1, "pending": 9}
    assert client.request("POST", "/heartbeat", json=body).json == {
        "state": "running",
        "alerts": [],
        "commands": [],
    }
    client.request("POST", "/heartbeat", json={**body, "dropped": 3})
    # A message that was spooled earlier carries an older count.
    client.send(client.batch(0, [1], scalars={"loss": [1.0]}, metadata={"fp8scope.dropped": "1"}))
    run = Run.objects.get()
    assert (run.rows_dropped, run.agent_errors, run.state) == (3, 1, RunState.RUNNING)


def test_a_failed_run_keeps_its_traceback(client: WireClient) -> None:
    client.register()
    finish = {
        "writer": str(client.writer),
        "seq": 0,
        "state": "failed",
        "error": "Traceback…\nValueError: no",
    }
    assert client.request("POST", "/finish", json=finish).status == 201
    assert client.request("POST", "/finish", json=finish).json["status"] == "duplicate"
    run = Run.objects.get()
    assert (run.state, run.error) == (RunState.FAILED, "Traceback…\nValueError: no")


def test_a_run_finishes_with_its_last_writer(client: WireClient) -> None:
    other = WireClient(client.url, client.token, run=client.run)
    client.register()
    for writer in (client, other):
        writer.send(writer.batch(0, [1], scalars={"loss": [1.0]}))
    finish = {"seq": 1, "rows_sent": 1, "points_sent": 1}
    client.request("POST", "/finish", json={**finish, "writer": str(client.writer)})
    assert Run.objects.get().state == RunState.RUNNING
    client.request("POST", "/finish", json={**finish, "writer": str(other.writer)})
    run = Run.objects.get()
    assert (run.state, run.rows_sent, run.rows_stored) == (RunState.FINISHED, 2, 2)


def test_answers_carry_the_alerts_that_the_client_has_not_seen(client: WireClient, server: Server) -> None:
    from fp8scope_dashboard.alerts.models import Alert

    client.register()
    for step in (3, 4):
        Alert.objects.create(
            run_id=client.run, kind="loss_spike", severity="critical", onset_step=step, step=step, message="!"
        )
    first, second = Alert.objects.order_by("id").values_list("id", flat=True)
    body = client.batch(0, [1], scalars={"loss": [1.0]})
    alerts = client.send(body).json["alerts"]
    assert [alert["id"] for alert in alerts] == [first, second]
    assert alerts[0].keys() == {
        *("id", "kind", "rule", "severity", "step", "onset_step", "value", "threshold", "message"),
        "opened_at",
    }
    assert [alert["id"] for alert in client.send(body, query=f"?alerts_after={first}").json["alerts"]] == [
        second
    ]
    assert len(client.request("GET").json["events"]) == 2


def test_projects_do_not_see_each_other(client: WireClient, server: Server) -> None:
    from fp8scope_dashboard.accounts.services import create_project
    from fp8scope_dashboard.accounts.tokens import create_token

    client.register()
    token = create_token(create_project("other", "Other"), "t")[1]
    stranger = WireClient(server.url, token, run=client.run)
    answer = stranger.request("GET")
    assert (answer.status, answer.code) == (404, "unknown_run")
    assert stranger.send(client.batch(0, [1], scalars={"loss": [1.0]})).code == "unknown_run"
    conflict = stranger.register()
    assert (conflict.status, conflict.code) == (409, "run_conflict")
    assert Run.objects.get().rows_stored == 0


def test_a_run_without_tensors_needs_no_catalogue(client: WireClient) -> None:
    client.register()
    assert client.send(client.batch(0, [0], scalars={"loss": [1.0]})).status == 201
    assert Writer.objects.get().uuid == client.writer
    assert WireClient(client.url, client.token, run=uuid.uuid4()).request("GET").code == "unknown_run"
