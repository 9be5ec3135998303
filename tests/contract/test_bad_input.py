"""The server refuses bad requests with a documented error, stores nothing of them, and keeps working."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import urllib3
from contract.helpers.refusals import assert_refused, good, registered
from contract.helpers.wire_client import ARROW, TIME, Answer, WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.accounts.tokens import revoke_token

Change = Callable[[WireClient], bytes]


@pytest.fixture
def client(server: Server) -> WireClient:
    return registered(server)


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
def test_refuses_a_wrong_token(client: WireClient, token: str | None, code: str) -> None:
    body = good(client)
    client.token = None
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode().decode("latin-1")}
    answer = client.request("POST", "/batches", body=body, headers={"Content-Type": ARROW, **headers})
    assert_refused(answer, 401, code)


def test_refuses_a_revoked_token(client: WireClient) -> None:
    revoke_token(ApiToken.objects.get())
    assert_refused(client.send(good(client)), 401, "bad_token")


def test_refuses_an_unknown_run(client: WireClient) -> None:
    client.run = uuid.uuid4()
    for method, path in [("GET", ""), ("POST", "/heartbeat"), ("POST", "/finish")]:
        body = {"writer": str(client.writer), "seq": 0} if method == "POST" else None
        assert_refused(client.request(method, path, json=body), 404, "unknown_run")
    assert_refused(client.send(good(client)), 404, "unknown_run")
    assert_refused(client.catalogue(["a"]), 404, "unknown_run")


def too_many_rows_in_header(client: WireClient) -> bytes:
    """A stream whose record batch header claims 1000 more rows than its buffers hold."""
    body = bytearray(client.batch(0, list(range(64)), compression=None))
    offsets = [i for i in range(0, len(body) - 8, 4) if struct.unpack_from("<q", body, i)[0] == 64]
    for offset in offsets:
        struct.pack_into("<q", body, offset, 1064)
    return bytes(body)


MALFORMED: dict[str, Change] = {
    "a dictionary": lambda c: good(c, columns={"scalar:a": pa.array(["a", "b"]).dictionary_encode()}),
    "truncated by a byte": lambda c: good(c)[:-1],
    "truncated in the middle": lambda c: good(c)[: len(good(c)) // 2],
    "truncated between record batches": lambda c: good(c)[:-8],
    "bytes lost in the middle": lambda c: good(c)[:200] + good(c)[280:],
    "more rows than bytes": too_many_rows_in_header,
    "no metadata": lambda c: good(c, metadata={"fp8scope.protocol": ""}),
    "no seq": lambda c: good(c, metadata={"fp8scope.seq": ""}),
    "seq is not a number": lambda c: good(c, metadata={"fp8scope.seq": "1e3"}),
    "seq is negative": lambda c: good(c, metadata={"fp8scope.seq": "-1"}),
    "seq is huge": lambda c: good(c, metadata={"fp8scope.seq": str(2**63)}),
    "writer is not a UUID": lambda c: good(c, metadata={"fp8scope.writer": "me"}),
    "dropped is not a number": lambda c: good(c, metadata={"fp8scope.dropped": "many"}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_refuses_a_malformed_batch(client: WireClient, case: str) -> None:
    assert_refused(client.send(MALFORMED[case](client)), 400, "malformed")


@pytest.mark.parametrize("body", [b"", b"hello", b"ARROW1\0\0" + b"\0" * 100, b"PAR1"])
def test_refuses_a_body_that_is_not_arrow(client: WireClient, body: bytes) -> None:
    assert_refused(client.send(body), 400, "not_arrow")
    assert_refused(client.send(good(client), content_type="application/octet-stream"), 400, "not_arrow")


@pytest.mark.parametrize("version", ["0", "2", "one"])
def test_refuses_another_protocol_version(client: WireClient, version: str) -> None:
    assert_refused(
        client.send(good(client, metadata={"fp8scope.protocol": version})), 400, "protocol_mismatch"
    )
    document = {"protocol": version, "writer": str(client.writer), "seq": 0, "rows": [{"step": 1}]}
    assert_refused(client.request("POST", "/batches", json=document), 400, "protocol_mismatch")


def with_column(name: str, array: pa.Array[Any]) -> Change:
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
    "step as int32": with_column("step", pa.array([1, 2], pa.int32())),
    "a null step": with_column("step", pa.array([1, None], pa.int64())),
    "a null time": with_column("time", times(TIME, None)),
    "time without a zone": with_column("time", pa.array([TIME, TIME], pa.timestamp("us"))),
    "time in milliseconds": with_column("time", pa.array([1, 2], pa.timestamp("ms", tz="UTC"))),
    "time in 1969": with_column("time", times(-1, TIME)),
    "time in 10000": with_column("time", times(TIME, 253_402_300_800_000_000)),
    "a scalar as text": with_column("scalar:loss", pa.array(["a", "b"])),
    "a scalar as float32": with_column("scalar:loss", pa.array([1, 2], pa.float32())),
    "an unknown column": with_column("loss", pa.array([1.0, 2.0])),
    "the store's own column": with_column("seq", pa.array([1, 2], pa.int64())),
    "a scalar's name with a space": with_column("scalar:a b", pa.array([1.0, 2.0])),
    "a scalar without a name": with_column("scalar:", pa.array([1.0, 2.0])),
    "a scalar's name too long": with_column("scalar:" + "x" * 129, pa.array([1.0, 2.0])),
    "a statistic's name": with_column("tensor:A-B", pa.array([[1.0, 2.0]] * 2, LISTS)),
    "a statistic as plain floats": with_column("tensor:amax", pa.array([1.0, 2.0])),
    "a statistic as lists of any length": with_column("tensor:amax", pa.array([[1.0], [2.0]])),
    "a statistic as integers": with_column("tensor:amax", pa.array([[1, 2]] * 2, pa.list_(pa.int64(), 2))),
    "a null list": with_column("tensor:amax", pa.array([[1.0, 2.0], None], LISTS)),
}


@pytest.mark.parametrize("case", INVALID)
def test_refuses_an_invalid_batch(client: WireClient, case: str) -> None:
    assert_refused(client.send(INVALID[case](client)), 422, "invalid")


def test_refuses_a_duplicate_column(client: WireClient) -> None:
    body = good(client, columns={"scalar:lost": pa.array([1.0, 2.0])}).replace(b"scalar:lost", b"scalar:loss")
    assert_refused(client.send(body), 422, "invalid")


def test_refuses_an_unsupported_content_encoding(client: WireClient) -> None:
    headers = {"Content-Type": ARROW, "Content-Encoding": "gzip"}
    assert_refused(client.request("POST", "/batches", body=good(client), headers=headers), 400, "malformed")


def test_unknown_addresses_and_methods_get_a_documented_error(server: Server) -> None:
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
    # The server has written for other tests, too.
    begin = len(server.log.read_text())
    client.send(b"nonsense")
    secret = "fp8s_SECRETSE_" + "S" * 43
    WireClient(server.url, secret, run=client.run).request("GET")
    client.register(name="", config={"password": "hunter2"})
    log = server.log.read_text()[begin:]
    assert server.token not in log
    assert secret not in log
    assert "hunter2" not in log
    assert "Traceback" not in log


def test_alerts_after_must_be_a_number(client: WireClient) -> None:
    for value in ("x", "-1", str(2**63), "1.5"):
        assert_refused(client.send(good(client), query=f"?alerts_after={value}"), 422, "invalid")
    assert json.loads(client.send(good(client), query="?alerts_after=0").body)["status"] == "stored"
