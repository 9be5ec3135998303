"""Whatever is wrong with a request: a clear answer, nothing stored, and the server goes on."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import urllib3
from contract.wire_client import ARROW, TIME, Answer, WireClient
from live_servers import Server

from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.accounts.services import revoke_token
from fp8scope_dashboard.ingest import limits
from fp8scope_dashboard.ingest.models import Receipt
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry.models import Chunk

Change = Callable[[WireClient], bytes]


@pytest.fixture
def client(server: Server) -> WireClient:
    client = WireClient(server.url, server.token)
    assert client.register().status == 201
    assert client.catalogue(["a", "b"]).status == 200
    return client


def good(client: WireClient, seq: int = 0, **columns: Any) -> bytes:
    return client.batch(seq, [1, 2], **{"scalars": {"loss": [1.0, 2.0]}, **columns})


def assert_refused(answer: Answer, status: int, code: str) -> None:
    assert (answer.status, answer.code) == (status, code), answer.body
    assert not Chunk.objects.exists()
    assert not Receipt.objects.exists()


def test_it_works(client: WireClient) -> None:
    assert client.send(good(client)).status == 201


@pytest.mark.parametrize(
    ("token", "code"),
    [
        (None, "no_token"),
        ("", "no_token"),
        ("nonsense", "bad_token"),
        ("fp8s_AAAAAAAA_" + "A" * 43, "bad_token"),
        ("fp8s_AAAAAAAA_" + "\u00e9" * 43, "bad_token"),
        ("x" * 5000, "bad_token"),
    ],
)
def test_a_wrong_token(client: WireClient, token: str | None, code: str) -> None:
    body = good(client)
    client.token = None
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode().decode("latin-1")}
    answer = client.request("POST", "/batches", body=body, headers={"Content-Type": ARROW, **headers})
    assert_refused(answer, 401, code)


def test_a_revoked_token(client: WireClient) -> None:
    revoke_token(ApiToken.objects.get())
    assert_refused(client.send(good(client)), 401, "bad_token")


def test_an_unknown_run(client: WireClient) -> None:
    client.run = uuid.uuid4()
    for method, path in [("GET", ""), ("POST", "/heartbeat"), ("POST", "/finish")]:
        body = {"writer": str(client.writer), "seq": 0} if method == "POST" else None
        assert_refused(client.request(method, path, json=body), 404, "unknown_run")
    assert_refused(client.send(good(client)), 404, "unknown_run")
    assert_refused(client.catalogue(["a"]), 404, "unknown_run")


def no_buffers(client: WireClient) -> bytes:
    """A stream whose record batch header says 1000 rows more than its buffers hold."""
    body = bytearray(client.batch(0, list(range(64)), compression=None))
    places = [i for i in range(0, len(body) - 8, 4) if struct.unpack_from("<q", body, i)[0] == 64]
    for place in places:
        struct.pack_into("<q", body, place, 1064)
    return bytes(body)


MALFORMED: dict[str, Change] = {
    "a dictionary": lambda c: good(c, columns={"scalar:a": pa.array(["a", "b"]).dictionary_encode()}),
    "truncated by a byte": lambda c: good(c)[:-1],
    "truncated in the middle": lambda c: good(c)[: len(good(c)) // 2],
    "truncated between record batches": lambda c: good(c)[:-8],
    "bytes lost in the middle": lambda c: good(c)[:200] + good(c)[280:],
    "more rows than bytes": no_buffers,
    "no metadata": lambda c: good(c, metadata={"fp8scope.protocol": ""}),
    "no seq": lambda c: good(c, metadata={"fp8scope.seq": ""}),
    "seq is no number": lambda c: good(c, metadata={"fp8scope.seq": "1e3"}),
    "seq is negative": lambda c: good(c, metadata={"fp8scope.seq": "-1"}),
    "seq is huge": lambda c: good(c, metadata={"fp8scope.seq": str(2**63)}),
    "writer is no UUID": lambda c: good(c, metadata={"fp8scope.writer": "me"}),
    "dropped is no number": lambda c: good(c, metadata={"fp8scope.dropped": "many"}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_batch(client: WireClient, case: str) -> None:
    assert_refused(client.send(MALFORMED[case](client)), 400, "malformed")


@pytest.mark.parametrize("body", [b"", b"hello", b"ARROW1\0\0" + b"\0" * 100, b"PAR1"])
def test_what_is_not_arrow(client: WireClient, body: bytes) -> None:
    assert_refused(client.send(body), 400, "not_arrow")
    assert_refused(client.send(good(client), content_type="application/octet-stream"), 400, "not_arrow")


@pytest.mark.parametrize("version", ["0", "2", "one"])
def test_another_protocol_version(client: WireClient, version: str) -> None:
    assert_refused(
        client.send(good(client, metadata={"fp8scope.protocol": version})), 400, "protocol_mismatch"
    )
    document = {"protocol": version, "writer": str(client.writer), "seq": 0, "rows": [{"step": 1}]}
    assert_refused(client.request("POST", "/batches", json=document), 400, "protocol_mismatch")


def of_type(name: str, array: pa.Array[Any]) -> Change:
    return lambda client: good(client, columns={name: array})


def times(*micros: int | None) -> pa.Array[Any]:
    return pa.array(micros, pa.timestamp("us", tz="UTC"))


LISTS = pa.list_(pa.float64(), 2)
INVALID: dict[str, Change] = {
    "another run": lambda c: good(c, metadata={"fp8scope.run": str(uuid.uuid4())}),
    "no rows": lambda c: c.batch(0, []),
    "steps decrease": lambda c: c.batch(0, [2, 1]),
    "steps decrease between record batches": lambda c: c.batch(0, [5, 6, 3, 4], record_batches=2),
    "a negative step": lambda c: c.batch(0, [-1, 1]),
    "step as int32": of_type("step", pa.array([1, 2], pa.int32())),
    "a null step": of_type("step", pa.array([1, None], pa.int64())),
    "a null time": of_type("time", times(TIME, None)),
    "time without a zone": of_type("time", pa.array([TIME, TIME], pa.timestamp("us"))),
    "time in milliseconds": of_type("time", pa.array([1, 2], pa.timestamp("ms", tz="UTC"))),
    "time in 1970": of_type("time", times(0, TIME)),
    "time in 10000": of_type("time", times(TIME, 253_402_300_800_000_000)),
    "a scalar as text": of_type("scalar:loss", pa.array(["a", "b"])),
    "a scalar as float32": of_type("scalar:loss", pa.array([1, 2], pa.float32())),
    "an unknown column": of_type("loss", pa.array([1.0, 2.0])),
    "the store's own column": of_type("seq", pa.array([1, 2], pa.int64())),
    "a scalar's name with a space": of_type("scalar:a b", pa.array([1.0, 2.0])),
    "a scalar without a name": of_type("scalar:", pa.array([1.0, 2.0])),
    "a scalar's name too long": of_type("scalar:" + "x" * 129, pa.array([1.0, 2.0])),
    "a statistic's name": of_type("tensor:A-B", pa.array([[1.0, 2.0]] * 2, LISTS)),
    "a statistic as plain floats": of_type("tensor:amax", pa.array([1.0, 2.0])),
    "a statistic as lists of any length": of_type("tensor:amax", pa.array([[1.0], [2.0]])),
    "a statistic as integers": of_type("tensor:amax", pa.array([[1, 2]] * 2, pa.list_(pa.int64(), 2))),
    "a null list": of_type("tensor:amax", pa.array([[1.0, 2.0], None], LISTS)),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_batch(client: WireClient, case: str) -> None:
    assert_refused(client.send(INVALID[case](client)), 422, "invalid")


def test_a_column_twice(client: WireClient) -> None:
    body = good(client, columns={"scalar:lost": pa.array([1.0, 2.0])}).replace(b"scalar:lost", b"scalar:loss")
    assert_refused(client.send(body), 422, "invalid")


def test_more_tensors_than_the_catalogue_has(client: WireClient) -> None:
    body = good(client, tensors={"amax": [[1.0, 2.0, 3.0]] * 2})
    assert_refused(client.send(body), 409, "catalogue_gap")
    assert client.catalogue(["a", "b", "c"]).json == {"count": 3}
    assert client.send(body).status == 201


def row(**fields: object) -> dict[str, object]:
    return {"step": 1, "time": "2026-01-01T00:00:00Z", "scalars": {"loss": 1.0}, **fields}


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
        ({"rows": [row(time="1999-12-31T00:00:00Z")]}, 422, "invalid"),
        ({"rows": [row(scalars=[1])]}, 422, "invalid"),
        ({"rows": [row(scalars={"loss": "high"})]}, 422, "invalid"),
        ({"rows": [row(scalars={"loss": True})]}, 422, "invalid"),
        ({"rows": [row(scalars={"loss": 10**400})]}, 422, "invalid"),
        ({"rows": [row(scalars={"a b": 1})]}, 422, "invalid"),
        ({"rows": [row(tensors={"amax": 3})]}, 422, "invalid"),
        ({"rows": [row(tensors={"amax": {"a": [1]}})]}, 422, "invalid"),
        ({"rows": [row(tensors={"amax": {"unheard of": 1}})]}, 409, "catalogue_gap"),
    ],
)
def test_a_bad_json_batch(client: WireClient, change: dict[str, object], status: int, code: str) -> None:
    document = {"protocol": 1, "writer": str(client.writer), "seq": 0, "rows": [row()], **change}
    assert_refused(client.request("POST", "/batches", json=document), status, code)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a": NaN', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000]
)
@pytest.mark.parametrize("path", ["/batches", "/evaluations", "/heartbeat"])
def test_what_is_not_json(client: WireClient, path: str, body: bytes) -> None:
    answer = client.request("POST", path, body=body, headers={"Content-Type": "application/json"})
    # A JSON value that is not an object is, where a schema is declared, one that does not keep it.
    assert (answer.status, answer.code) in {(400, "malformed"), (422, "invalid")}
    assert not Receipt.objects.exists()


EVALUATION = {"seq": 0, "step": 1, "name": "task", "metric": "accuracy", "kind": "mean", "items": [0.5, 0.25]}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "median"},
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
def test_a_bad_evaluation(client: WireClient, change: dict[str, object]) -> None:
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
def test_a_bad_registration(client: WireClient, change: dict[str, object]) -> None:
    client.run = uuid.uuid4()
    assert_refused(client.register(**change), 422, "invalid")
    assert not Run.objects.filter(pk=client.run).exists()


def test_text_that_is_no_unicode(client: WireClient) -> None:
    client.run = uuid.uuid4()
    for field in ("name", "config"):
        body = b'{"name": "a", "%s": {"x": "\\ud800"}}' % field.encode()
        if field == "name":
            body = b'{"name": "\\ud800"}'
        answer = client.request("PUT", body=body, headers={"Content-Type": "application/json"})
        assert_refused(answer, 422, "invalid")


def test_a_bad_catalogue(client: WireClient) -> None:
    assert_refused(client.catalogue(["z"], offset=5), 409, "catalogue_gap")
    assert_refused(client.catalogue(["b", "a"]), 409, "writer_conflict")
    assert_refused(client.catalogue(["c", "c"], offset=2), 422, "invalid")
    assert_refused(client.catalogue(["a"], offset=2), 422, "invalid")
    assert_refused(client.catalogue(["x" * 513], offset=2), 422, "invalid")
    assert_refused(client.catalogue(["c"], offset=2, rank=-1), 422, "invalid")
    assert Tensor.objects.count() == 2


def test_more_tensors_than_a_run_may_have(client: WireClient) -> None:
    assert client.catalogue([f"t{i}" for i in range(limits.TENSORS - 2)], offset=2).json == {"count": 20_000}
    other = WireClient(client.url, client.token, run=client.run)
    assert other.catalogue(["a", "b"]).json == {"count": 2}
    assert_refused(other.catalogue(["one too many"], offset=2), 413, "too_large")
    assert Tensor.objects.count() == limits.TENSORS


def test_an_oversized_request(client: WireClient) -> None:
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        body = b"\xff" * (limits.REQUEST_BYTES + 1)
        sent: Any = (body[i : i + limits.MIB] for i in range(0, len(body), limits.MIB)) if headers else body
        answer = client.request("POST", "/batches", body=sent, headers={"Content-Type": ARROW})
        assert_refused(answer, 413, "too_large")


def test_a_request_of_exactly_the_limit_is_read(client: WireClient) -> None:
    answer = client.send(b"x" * limits.REQUEST_BYTES)
    assert_refused(answer, 400, "not_arrow")


def test_too_many_rows(client: WireClient) -> None:
    assert client.send(client.batch(0, range(limits.ROWS))).json["rows"] == limits.ROWS
    client.run, client.writer = Run.objects.get().id, uuid.uuid4()
    answer = client.send(client.batch(0, range(limits.ROWS + 1)))
    assert (answer.status, answer.code) == (413, "too_large")
    answer = client.send(client.batch(0, range(limits.ROWS + 1), record_batches=50))
    assert (answer.status, answer.code) == (413, "too_large")
    assert Chunk.objects.count() == 1


def test_too_many_names(client: WireClient) -> None:
    scalars = {f"s{i}": [1.0] for i in range(limits.SCALARS)}
    assert_refused(client.send(client.batch(0, [1], scalars={**scalars, "more": [1.0]})), 413, "too_large")
    assert client.send(client.batch(0, [1], scalars=scalars)).status == 201
    # Nor one by one over the steps.
    answer = client.send(client.batch(1, [1], scalars={"more": [1.0]}))
    assert (answer.status, answer.code) == (422, "invalid")
    assert client.send(client.batch(1, [1], scalars={"s0": [1.0]})).status == 201
    statistics = {f"x{i}": [[1.0]] for i in range(limits.STATISTICS + 1)}
    answer = client.send(client.batch(2, [1], tensors=statistics))
    assert (answer.status, answer.code) == (413, "too_large")


def test_an_encoding_that_is_not_offered(client: WireClient) -> None:
    headers = {"Content-Type": ARROW, "Content-Encoding": "gzip"}
    assert_refused(client.request("POST", "/batches", body=good(client), headers=headers), 400, "malformed")


def test_addresses_and_methods_that_are_not_there(server: Server) -> None:
    for method, path, status, code in [
        ("GET", "/api/v1/nothing", 404, "not_found"),
        ("GET", "/api/v2/runs", 404, "not_found"),
        ("PATCH", f"/api/v1/runs/{uuid.uuid4()}", 405, "method_not_allowed"),
        ("DELETE", f"/api/v1/runs/{uuid.uuid4()}", 404, "unknown_run"),
        ("GET", f"/api/v1/runs/{uuid.uuid4()}/batches", 405, "method_not_allowed"),
        ("GET", "/api/v1/runs/not-a-uuid", 422, "invalid"),
    ]:
        headers = {"Authorization": f"Bearer {server.token}"}
        response = urllib3.request(method, server.url + path, headers=headers, retries=False)
        answer = Answer(response.status, response.headers, response.data)
        assert (answer.status, answer.code) == (status, code)


def test_no_secret_reaches_the_log(client: WireClient, server: Server) -> None:
    client.send(b"nonsense")
    secret = "fp8s_SECRETSE_" + "S" * 43
    WireClient(server.url, secret, run=client.run).request("GET")
    client.register(name="", config={"password": "hunter2"})
    log = server.log.read_text()
    assert server.token not in log
    assert secret not in log
    assert "hunter2" not in log
    assert "Traceback" not in log


def test_alerts_after_must_be_a_number(client: WireClient) -> None:
    for value in ("x", "-1", str(2**63), "1.5"):
        assert_refused(client.send(good(client), query=f"?alerts_after={value}"), 422, "invalid")
    assert json.loads(client.send(good(client), query="?alerts_after=0").body)["status"] == "stored"
