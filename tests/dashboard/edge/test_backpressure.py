"""A gate bounds the bytes in flight."""

from __future__ import annotations

import threading

import pytest
from dashboard.helpers.recorder import Recorder
from django.test import Client

from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.edge import backpressure
from fp8scope_dashboard.edge.backpressure import Gate
from fp8scope_dashboard.wire.errors import SlowDownError


def test_it_works() -> None:
    gate = Gate(100)
    with gate.admit(60), gate.admit(40):
        with pytest.raises(SlowDownError) as refused, gate.admit(1):
            pass
        assert refused.value.headers() == {"Retry-After": "1"}
    with gate.admit(100):
        pass


def test_an_empty_gate_admits_any_size() -> None:
    gate = Gate(100)
    with gate.admit(1000), pytest.raises(SlowDownError), gate.admit(1):
        pass


def test_a_failed_request_releases_its_bytes() -> None:
    gate = Gate(100)
    with pytest.raises(ZeroDivisionError), gate.admit(100):
        raise ZeroDivisionError
    with gate.admit(100):
        pass


def test_threads_never_exceed_the_budget() -> None:
    gate, inside, most, refused = Gate(10), [0], [0], [0]
    lock = threading.Lock()

    def work() -> None:
        for _ in range(200):
            try:
                with gate.admit(4):
                    with lock:
                        inside[0] += 4
                        most[0] = max(most[0], inside[0])
                    with lock:
                        inside[0] -= 4
            except SlowDownError:
                with lock:
                    refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= 10
    assert inside[0] == 0


@pytest.mark.django_db
def test_a_busy_server_sends_retry_after(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from contract.helpers.wire_client import ARROW, arrow_batch

    recorder = Recorder.of_new_run()
    token = create_token(recorder.run.project, "t")[1]
    body = arrow_batch(recorder.run.id, recorder.writer, 0, [1], scalars={"loss": [1.0]})
    gate = Gate(1000)
    monkeypatch.setattr("fp8scope_dashboard.api.batches.gate", gate)

    def send() -> tuple[int, str | None]:
        answer = client.post(
            f"/api/v1/runs/{recorder.run.id}/batches",
            body,
            content_type=ARROW,
            headers={"Authorization": f"Bearer {token}"},
        )
        return answer.status_code, answer.headers.get("Retry-After")

    with gate.admit(900):
        assert send() == (429, "1")
    assert send() == (201, None)
    assert backpressure.gate is not gate
