"""Each message is stored once, even if retried, sent concurrently, or sent by two writers with one id."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contract.helpers.wire_client import Answer, WireClient
from helpers.live_servers import Server, web_server

from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.models import Chunk

THREADS = 8


@pytest.fixture
def client(server: Server) -> WireClient:
    client = WireClient(server.url, server.token)
    assert client.register().status == 201
    return client


def send_concurrently(bodies: list[bytes], client: WireClient) -> list[Answer]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(client.send, bodies))


def statuses(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.json["status"] if answer.status < 300 else answer.code for answer in answers)


def test_it_works(client: WireClient) -> None:
    body = client.batch(0, [1, 2], scalars={"loss": [3.0, 2.0]})
    first, second = client.send(body), client.send(body)
    assert (first.status, second.status) == (201, 200)
    # The pause goes by what messages have cost until then.
    assert first.json == {**second.json, "status": "stored", "pause": first.json["pause"]}
    assert second.json["status"] == "duplicate"
    run = Run.objects.get()
    assert (run.rows_stored, run.points_stored, Chunk.objects.count()) == (2, 2, 1)


def test_stores_a_batch_from_many_threads_once(client: WireClient) -> None:
    for seq in range(5):
        body = client.batch(seq, [seq], scalars={"loss": [1.0]})
        assert statuses(send_concurrently([body] * THREADS, client)) == {
            "stored": 1,
            "duplicate": THREADS - 1,
        }
    run = Run.objects.get()
    assert (run.rows_stored, Chunk.objects.count(), Receipt.objects.count()) == (5, 5, 5)
    assert Writer.objects.count() == 1


def test_counts_all_of_many_concurrent_batches(client: WireClient) -> None:
    bodies = [client.batch(seq, [seq, seq], scalars={"loss": [1.0, None]}) for seq in range(100)]
    answers = send_concurrently([*bodies, *bodies[::-1]], client)
    assert statuses(answers) == {"stored": 100, "duplicate": 100}
    run = Run.objects.get()
    assert (run.rows_stored, run.points_stored, run.last_step) == (200, 100, 99)
    assert queries.contiguous_until(run.id, client.writer) == 100
    assert len(queries.scalar(run.id, "loss")) == 100


def test_refuses_a_second_writer_with_the_same_id(client: WireClient) -> None:
    first = client.batch(0, [1], scalars={"loss": [1.0]})
    second = client.batch(0, [1], scalars={"loss": [2.0]})
    assert client.send(first).status == 201
    answer = client.send(second)
    assert (answer.status, answer.code) == (409, "writer_conflict")
    assert client.send(first).json["status"] == "duplicate"
    assert queries.scalar(client.run, "loss").values.tolist() == [1.0]


def test_accepts_one_of_several_concurrent_writers_with_the_same_id(client: WireClient) -> None:
    bodies = [client.batch(0, [1], scalars={"loss": [float(i)]}) for i in range(THREADS)]
    assert statuses(send_concurrently(bodies, client)) == {"stored": 1, "writer_conflict": THREADS - 1}
    assert Run.objects.get().rows_stored == 1


def test_all_kinds_of_messages_share_one_sequence(client: WireClient) -> None:
    assert client.send(client.batch(0, [1], scalars={"loss": [1.0]})).status == 201
    scores = {
        "writer": str(client.writer),
        "step": 1,
        "name": "n",
        "metric": "m",
        "kind": "mean",
        "items": [1.0],
    }
    conflict = client.request("POST", "/evaluations", json={**scores, "seq": 0})
    assert (conflict.status, conflict.code) == (409, "writer_conflict")
    assert client.request("POST", "/evaluations", json={**scores, "seq": 1}).status == 201
    assert client.request("POST", "/evaluations", json={**scores, "seq": 1}).status == 200
    assert Evaluation.objects.count() == 1
    conflict = client.request("POST", "/finish", json={"writer": str(client.writer), "seq": 1})
    assert conflict.code == "writer_conflict"
    assert Run.objects.get().state == "running"


def test_stores_a_concurrent_finish_once(client: WireClient) -> None:
    finish = {"writer": str(client.writer), "seq": 0, "rows_sent": 10, "points_sent": 20, "dropped": 1}
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda _: client.request("POST", "/finish", json=finish), range(THREADS)))
    assert statuses(answers) == {"stored": 1, "duplicate": THREADS - 1}
    run = Run.objects.get()
    assert (run.rows_sent, run.points_sent, run.rows_dropped) == (10, 20, 1)


def test_concurrent_registrations_and_catalogues_agree(server: Server) -> None:
    client = WireClient(server.url, server.token)
    names = [f"t{i}" for i in range(50)]
    writers = [WireClient(server.url, server.token, run=client.run) for _ in range(THREADS)]

    def begin(writer: WireClient) -> tuple[int, int]:
        registered = writer.register()
        writer.catalogue(names[::-1] if writers.index(writer) % 2 else names)
        return registered.status, writer.catalogue(names[:5], offset=50).status

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(begin, writers))
    assert Counter(status for status, _ in answers) == {201: 1, 200: THREADS - 1}
    # The catalogue contains these five names already, so they cannot be appended.
    assert {status for _, status in answers} == {422}
    run = Run.objects.get()
    assert sorted(run.tensors.values_list("name", flat=True)) == sorted(names)
    assert sorted(run.tensors.values_list("index", flat=True)) == list(range(50))


def test_a_refused_message_can_be_corrected(client: WireClient) -> None:
    wrong = client.batch(0, [2, 1], scalars={"loss": [1.0, 2.0]})
    assert client.send(wrong).code == "invalid"
    assert client.send(client.batch(0, [1, 2], scalars={"loss": [1.0, 2.0]})).status == 201


def test_an_agent_that_is_asked_to_wait_loses_nothing(server: Server, tmp_path: Path) -> None:
    import fp8scope

    with web_server(tmp_path / "web.log", FP8SCOPE_INGEST_MIB="0") as (url, _):
        # Only one batch at a time fits, and `busy` nearly always has one in progress.
        busy = WireClient(url, server.token)
        busy.register()
        busy.catalogue([f"t{i}" for i in range(1000)])
        body = busy.batch(0, list(range(400)), tensors={"amax": [[1.0] * 1000] * 400})
        stop = threading.Event()

        def push() -> None:
            while not stop.is_set():
                busy.send(body)

        pushers = [threading.Thread(target=push) for _ in range(4)]
        for pusher in pushers:
            pusher.start()
        try:
            run = fp8scope.init(
                name="patient", url=url, token=server.token, directory=tmp_path / "spool", mode="online"
            )
            deadline = time.monotonic() + 120
            steps = 0
            while refusals(tmp_path / "web.log", run.id) == 0:
                assert time.monotonic() < deadline
                with run.step() as step:
                    step.log(loss=1.0)
                steps += 1
                time.sleep(0.02)
        finally:
            stop.set()
            for pusher in pushers:
                pusher.join()
        report = run.finish(timeout=120)
    stored = Run.objects.get(pk=run.id)
    assert report.complete and (stored.rows_stored, stored.state) == (steps, "finished")
    assert len(queries.scalar(stored.pk, "loss")) == steps


def refusals(log: Path, run: object) -> int:
    """How many batches of this run the server has answered with 429."""
    return sum("Too Many Requests" in line and str(run) in line for line in log.read_text().splitlines())
