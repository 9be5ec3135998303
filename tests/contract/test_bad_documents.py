"""The server refuses invalid JSON: batches, evaluations, registrations and catalogues."""

from __future__ import annotations

import uuid

import pytest
from contract.helpers.refusals import assert_refused, registered
from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.wire import limits


@pytest.fixture
def client(server: Server) -> WireClient:
    return registered(server)


def row(**fields: object) -> dict[str, object]:
    return {"step": 1, "time": "2026-01-01T00:00:00Z", "scalars": {"loss": 1.0}, **fields}


def test_it_works(client: WireClient) -> None:
    document = {"protocol": 1, "writer": str(client.writer), "seq": 0, "rows": [row()]}
    assert client.request("POST", "/batches", json=document).status == 201
    scores = {"writer": str(client.writer), **EVALUATION, "seq": 1}
    assert client.request("POST", "/evaluations", json=scores).status == 201


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"protocol": None, "seq": None}, 400, "protocol_mismatch"),
        ({"seq": "many"}, 400, "malformed"),
        ({"seq": 1.5}, 400, "malformed"),
        ({"writer": 3}, 422, "invalid"),
        ({"writer": None}, 422, "invalid"),
        ({"rows": []}, 422, "invalid"),
        ({"rows": {}}, 422, "invalid"),
        ({"rows": [1]}, 422, "invalid"),
        ({"rows": [row(step="1")]}, 422, "invalid"),
        ({"rows": [row(step=-1)]}, 422, "invalid"),
        ({"rows": [row(step=True)]}, 422, "invalid"),
        ({"rows": [row(step=2**63)]}, 422, "invalid"),
        ({"rows": [row(step=2), row(step=1)]}, 422, "invalid"),
        ({"rows": [row(time="yesterday")]}, 422, "invalid"),
        ({"rows": [row(time="2026-01-01T00:00:00")]}, 422, "invalid"),
        ({"rows": [row(time=5)]}, 422, "invalid"),
        ({"rows": [row(time="0001-01-01T00:00:00+14:00")]}, 422, "invalid"),
        ({"rows": [row(time="1969-12-31T00:00:00Z")]}, 422, "invalid"),
        ({"rows": [row(scalars=[1])]}, 422, "invalid"),
        ({"rows": [row(scalars={"loss": "high"})]}, 422, "invalid"),
        ({"rows": [row(scalars={"loss": True})]}, 422, "invalid"),
        ({"rows": [row(scalars={"loss": 10**400})]}, 422, "invalid"),
        ({"rows": [row(scalars={"a b": 1})]}, 422, "invalid"),
        ({"rows": [row(tensors={"amax": 3})]}, 422, "invalid"),
        ({"rows": [row(tensors={"amax": {"a": [1]}})]}, 422, "invalid"),
        ({"rows": [row(tensors={"amax": {"unknown": 1}})]}, 409, "catalogue_gap"),
    ],
)
def test_refuses_a_bad_json_batch(
    client: WireClient, change: dict[str, object], status: int, code: str
) -> None:
    document = {"protocol": 1, "writer": str(client.writer), "seq": 0, "rows": [row()], **change}
    assert_refused(client.request("POST", "/batches", json=document), status, code)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a": NaN', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000]
)
@pytest.mark.parametrize("path", ["/batches", "/evaluations", "/heartbeat"])
def test_refuses_a_body_that_is_not_json(client: WireClient, path: str, body: bytes) -> None:
    answer = client.request("POST", path, body=body, headers={"Content-Type": "application/json"})
    # Where a schema is declared, a JSON value that is not an object violates the schema (422).
    assert (answer.status, answer.code) in {(400, "malformed"), (422, "invalid")}
    assert not Receipt.objects.exists()


EVALUATION = {"seq": 0, "step": 1, "name": "task", "metric": "accuracy", "kind": "mean", "items": [0.5, 0.25]}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "median"},
        {"precision": "int8"},
        {"margin": 0},
        {"items": []},
        {"items": ["high"]},
        {"items": [None]},
        {"items": [0.5] * (limits.EVALUATION_ITEMS + 1)},
        {"kind": "proportion"},
        {"item_ids": ["a"]},
        {"item_ids": ["a", "a"]},
        {"item_ids": ["a", "x" * 129]},
        {"clusters": ["a", "b", "c"]},
        {"name": ""},
        {"name": "x" * 129},
        {"name": "NUL\0"},
        {"step": -1},
        {"seq": 2**63},
        {"writer": "me"},
    ],
)
def test_refuses_a_bad_evaluation(client: WireClient, change: dict[str, object]) -> None:
    document = {"writer": str(client.writer), **EVALUATION, **change}
    assert_refused(client.request("POST", "/evaluations", json=document), 422, "invalid")


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "x" * 201},
        {"name": "NUL\0"},
        {"config": {"a": "NUL\0"}},
        {"config": [1]},
        {"tags": ["x" * 65]},
        {"seed": 2**63},
        {"total_steps": -1},
        {"created_at": "2026-01-01T00:00:00"},
        {"group": None},
    ],
)
def test_refuses_a_bad_registration(client: WireClient, change: dict[str, object]) -> None:
    client.run = uuid.uuid4()
    assert_refused(client.register(**change), 422, "invalid")
    assert not Run.objects.filter(pk=client.run).exists()


def test_refuses_text_that_is_not_unicode(client: WireClient) -> None:
    client.run = uuid.uuid4()
    for field in ("name", "config"):
        body = b'{"name": "a", "%s": {"x": "\\ud800"}}' % field.encode()
        if field == "name":
            body = b'{"name": "\\ud800"}'
        answer = client.request("PUT", body=body, headers={"Content-Type": "application/json"})
        assert_refused(answer, 422, "invalid")


def test_refuses_a_bad_catalogue(client: WireClient) -> None:
    assert_refused(client.catalogue(["z"], offset=5), 409, "catalogue_gap")
    assert_refused(client.catalogue(["b", "a"]), 409, "writer_conflict")
    assert_refused(client.catalogue(["c", "c"], offset=2), 422, "invalid")
    assert_refused(client.catalogue(["a"], offset=2), 422, "invalid")
    assert_refused(client.catalogue(["x" * 513], offset=2), 422, "invalid")
    assert_refused(client.catalogue(["c"], offset=2, rank=-1), 422, "invalid")
    assert Tensor.objects.count() == 2
