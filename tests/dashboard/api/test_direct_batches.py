"""Batches that are answered without Django's request get the same answers as from Django's view."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from contract.helpers.wire_client import ARROW, arrow_batch
from dashboard.helpers import asgi_views
from dashboard.helpers.asgi_views import Answer
from dashboard.helpers.recorder import Recorder
from django.db import connection, connections

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token, revoke_token
from fp8scope_dashboard.alerts.models import Alert, Rule
from fp8scope_dashboard.api import batches
from fp8scope_dashboard.api.direct_batches import DirectBatches
from fp8scope_dashboard.api.responses import Known
from fp8scope_dashboard.edge.admission import Admission
from fp8scope_dashboard.edge.scope import CALLER, Receive, Scope, Send
from fp8scope_dashboard.edge.thread_pools import BATCHES, KNOWN, VISITORS, ThreadPool, ThreadPools
from fp8scope_dashboard.edge.threaded_asgi import Handler
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.models import Chunk

pytestmark = pytest.mark.django_db(transaction=True)

NO_RUN = UUID("0198c0de-0000-7000-8000-000000000000")


@dataclass
class Installation:
    """The applications of a web process, and the requests that reached Django."""

    direct: Callable[..., Any]
    django: Callable[..., Any]
    passed_on: list[str]
    token: str
    pools: ThreadPools

    def post(
        self,
        path: str,
        body: bytes,
        kind: str = ARROW,
        *,
        direct: bool = True,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        given = {
            "host": "localhost",
            "authorization": f"Bearer {token or self.token}",
            "content-type": kind,
            "content-length": str(len(body)),
            **(headers or {}),
        }
        return asgi_views.ask(
            self.direct if direct else self.django, path, "POST", headers=given, pieces=(body,)
        )

    def send(self, recorder: Recorder, seq: int, **options: Any) -> Answer:
        """Send the step `seq` of a run as its message `seq`."""
        body = arrow_batch(recorder.run.id, recorder.writer, seq, [seq], scalars={"loss": [1.0]})
        return self.post(f"/api/v1/runs/{recorder.run.id}/batches", body, **options)


@pytest.fixture
def installation() -> Iterator[Installation]:
    project = create_project("default", "Default")
    pools = ThreadPools({name: ThreadPool(name, 1, None) for name in (KNOWN, VISITORS, BATCHES)})
    handler, passed_on = Handler(pools), list[str]()

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        passed_on.append(scope["path"])
        await handler(scope, receive, send)

    direct = Admission(DirectBatches(noting, pools), pools)
    secret = create_token(project, "tests", scopes=("write", "read"))[1]
    yield Installation(direct, Admission(handler, pools), passed_on, secret, pools)
    asgi_views.run(lambda: pools[BATCHES].run(connections.close_all))


def test_it_works(installation: Installation) -> None:
    recorder = Recorder.of_new_run()
    answer = installation.send(recorder, 0)
    assert answer.status == 201, answer.body
    assert installation.send(recorder, 0).status == 200
    assert Run.objects.get().rows_stored == 1 and not installation.passed_on


Case = Callable[[Installation, Recorder, bool], Answer]


def _arrow(seq: int = 0, run: UUID | None = None, **options: Any) -> Case:
    def send(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
        body = arrow_batch(run or recorder.run.id, recorder.writer, seq, [seq], **options)
        return installation.post(f"/api/v1/runs/{recorder.run.id}/batches", body, direct=direct)

    return send


def _body(body: bytes, kind: str = ARROW, query: str = "") -> Case:
    def send(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
        text = body.replace(b"WRITER", str(recorder.writer).encode())
        return installation.post(f"/api/v1/runs/{recorder.run.id}/batches{query}", text, kind, direct=direct)

    return send


def _twice(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
    assert installation.send(recorder, 0, direct=direct).status == 201
    return installation.send(recorder, 0, direct=direct)


def _conflict(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
    assert installation.send(recorder, 0, direct=direct).status == 201
    body = arrow_batch(recorder.run.id, recorder.writer, 0, [7], scalars={"loss": [7.0]})
    return installation.post(f"/api/v1/runs/{recorder.run.id}/batches", body, direct=direct)


def _news(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
    rule = Rule.objects.get(project=recorder.run.project, kind="loss_spike")
    Alert.objects.create(
        run=recorder.run, rule=rule, kind=rule.kind, rule_name="Spike", severity="warning", onset_step=1,
        step=1, message="Up.",
    )  # fmt: skip
    return installation.send(recorder, 0, direct=direct)


def _unknown_run(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
    body = arrow_batch(NO_RUN, recorder.writer, 0, [0], scalars={"loss": [1.0]})
    return installation.post(f"/api/v1/runs/{NO_RUN}/batches", body, direct=direct)


def _reader(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
    token = create_token(recorder.run.project, "reads", scopes=("read",))[1]
    return installation.send(recorder, 0, direct=direct, token=token)


def _elsewhere(installation: Installation, recorder: Recorder, direct: bool) -> Answer:
    other = Project.objects.get_or_create(slug="other", name="Other")[0]
    return installation.send(recorder, 0, direct=direct, token=create_token(other, "t")[1])


JSON_ROWS = b'{"protocol": 1, "writer": "WRITER", "seq": 0, "rows": [%s]}'
ROW = b'{"step": 1, "time": "2026-01-01T00:00:00Z", "scalars": {"loss": 1.0}}'
CASES: dict[str, tuple[Case, int]] = {
    "stored": (_arrow(scalars={"loss": [1.0]}), 201),
    "duplicate": (_twice, 200),
    "news": (_news, 201),
    "conflict": (_conflict, 409),
    "catalogue gap": (_arrow(tensors={"amax": [[1.0, 2.0]]}), 409),
    "another run": (_arrow(run=NO_RUN), 422),
    "unknown run": (_unknown_run, 404),
    "a token that only reads": (_reader, 403),
    "a token of another project": (_elsewhere, 404),
    "not arrow": (_body(b"x" * 100), 400),
    "truncated": (_body(b"\xff\xff\xff\xff" + b"x" * 100), 400),
    "json": (_body(JSON_ROWS % ROW, "application/json"), 201),
    "json without rows": (_body(JSON_ROWS % b"", "application/json"), 422),
    "no json": (_body(b"{", "application/json"), 400),
    "deep json": (_body(b"[" * 100_000, "application/json"), 400),
    "a query": (_body(JSON_ROWS % ROW, "application/json", "?alerts_after=3&commands_after=2&urgent=1"), 201),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_like_django(installation: Installation, name: str) -> None:
    case, status = CASES[name]
    expected, actual = (case(installation, Recorder.of_new_run(), direct) for direct in (False, True))
    assert actual.status == expected.status == status, actual.body
    assert not installation.passed_on
    assert _plain(actual) == _plain(expected)
    # The pause has more or fewer digits.
    lengths = (b"content-length",)
    assert _lowered(actual, lengths) == _lowered(expected, lengths)
    assert int(dict(_lowered(actual))[b"content-length"]) == len(actual.body)


def _plain(answer: Answer) -> bytes:
    """The body without what differs between two runs: ids, times and the pause."""
    uuids = re.sub(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", b"UUID", answer.body)
    return re.sub(rb'"(id|opened_at|pause)": ("[^"]*"|[0-9.]+)', rb'"\1": VALUE', uuids)


def _lowered(answer: Answer, without: tuple[bytes, ...] = ()) -> list[tuple[bytes, bytes]]:
    return sorted((name.lower(), value) for name, value in answer.headers if name.lower() not in without)


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("?urgent=true", {}),
        ("?alerts_after=-1", {}),
        ("?alerts_after=1&alerts_after=2", {}),
        ("?other=1", {}),
        ("", {"content-encoding": "gzip"}),
        ("", {"host": "elsewhere.test"}),
        ("", {"content-type": "text/plain"}),
        ("", {"content-length": "0"}),
        ("/", {}),
    ],
)
def test_other_requests_go_to_django(
    installation: Installation, settings: Any, query: str, headers: dict[str, str]
) -> None:
    settings.ALLOWED_HOSTS = ["localhost"]
    recorder = Recorder.of_new_run()
    body = arrow_batch(recorder.run.id, recorder.writer, 0, [0], scalars={"loss": [1.0]})
    path = f"/api/v1/runs/{recorder.run.id}/batches{query}"
    actual = installation.post(path, body, headers=headers)
    assert len(installation.passed_on) == 1
    expected = installation.post(path, body, headers=headers, direct=False)
    assert expected.status in (actual.status, 200)


def test_redirects_and_promises_https_as_django_does(installation: Installation, settings: Any) -> None:
    settings.SECURE_SSL_REDIRECT, settings.SECURE_HSTS_SECONDS = True, 60
    settings.SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    pools = installation.pools
    handler = Admission(Handler(pools), pools)
    installation.direct = Admission(DirectBatches(handler, pools), pools)
    recorder = Recorder.of_new_run()
    assert installation.send(recorder, 0).status == 301
    answer = installation.send(recorder, 0, headers={"x-forwarded-proto": "https"})
    promised = dict(_lowered(answer))[b"strict-transport-security"]
    assert answer.status == 201 and promised.startswith(b"max-age=60")


def test_a_revoked_token_is_refused_at_once(installation: Installation) -> None:
    recorder = Recorder.of_new_run()
    token, secret = create_token(recorder.run.project, "mine")
    assert installation.send(recorder, 0, token=secret).status == 201
    revoke_token(token)
    assert installation.send(recorder, 1, token=secret).status == 401
    assert installation.send(recorder, 2, token=secret).status == 401
    assert Receipt.objects.count() == 1 and not installation.passed_on


def test_a_broken_connection_loses_nothing(installation: Installation) -> None:
    """PostgreSQL may have restarted since the last batch, whose connection the thread has kept."""
    recorder = Recorder.of_new_run()
    assert installation.send(recorder, 0).status == 201
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert cursor.fetchone()[0] >= 1
    assert installation.send(recorder, 1).status == 201
    assert sorted(Receipt.objects.values_list("seq", flat=True)) == [0, 1]


def _trips(work: Callable[[], Any]) -> list[str]:
    """The messages that end a round trip to PostgreSQL, as libpq traces them, of this thread's connection."""
    raw = connection.connection.pgconn
    with tempfile.TemporaryFile() as file:
        raw.trace(file.fileno())
        try:
            work()
        finally:
            raw.untrace()
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        lines = [line.split("\t") for line in file.read().decode(errors="replace").splitlines()]
    return [line[3] for line in lines if line[1:2] == ["F"] and line[3] in ("Sync", "Query")]


def test_a_batch_takes_two_round_trips(installation: Installation) -> None:
    """One reads who sends, the other stores: acknowledged is what the second has committed."""
    recorder = Recorder.of_new_run(["a"])
    pool, trips = installation.pools[BATCHES], list[str]()

    def take(seq: int) -> None:
        nonlocal trips
        columns: dict[str, Any] = {"scalars": {"loss": [1.0]}, "tensors": {"amax": [[1.0]]}}
        sent = batches.Sent(
            run=recorder.run.id,
            secret=installation.token,
            kind=ARROW,
            body=arrow_batch(recorder.run.id, recorder.writer, seq, [seq], **columns),
            received=Known(alerts_after=0, commands_after=None),
        )
        connection.ensure_connection()
        trips = _trips(lambda: batches.take(sent))

    for seq in range(8):
        asgi_views.run(partial(pool.run, partial(take, seq)))
    assert len(trips) == 2, trips
    assert Chunk.objects.count() == Receipt.objects.count() == 8


def test_a_batch_of_a_new_writer_with_losses_is_counted(installation: Installation) -> None:
    recorder = Recorder(Recorder.of_new_run().run, writer=uuid4())
    body = arrow_batch(
        recorder.run.id, recorder.writer, 0, [0], scalars={"loss": [1.0]},
        metadata={"fp8scope.dropped": "5"},
    )  # fmt: skip
    answer = installation.post(f"/api/v1/runs/{recorder.run.id}/batches", body)
    assert answer.status == 201, answer.body
    run = Run.objects.get()
    assert (run.rows_dropped, run.rows_stored) == (5, 1)
    assert run.writers.get(uuid=recorder.writer).rows_dropped == 5


def test_the_door_must_have_admitted_the_token(installation: Installation) -> None:
    """Without it an unauthenticated body would be read."""
    recorder, seen = Recorder.of_new_run(), list[Scope]()

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    installation.direct = DirectBatches(noting, installation.pools)
    assert installation.send(recorder, 0).status == 204
    assert CALLER not in seen[0] and not Receipt.objects.exists()
