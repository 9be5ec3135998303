"""A stored NaN raises an alert, which reaches a signed webhook and the training process; verdicts appear.

Web server, Celery worker, PostgreSQL, Redis and the receiver are real.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from contract.helpers.wire_client import Answer, WireClient
from helpers.live_servers import Server, Worker
from helpers.waiting import wait_until

from fp8scope_dashboard.alerts.models import Channel, Delivery
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.db.encryption import encrypt_json

SECRET = "only for this test"


@pytest.fixture
def received() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A receiver of webhooks: its address and the (signature, body) pairs it has received."""
    requests: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.headers["Fp8scope-Signature"], body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=receiver.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{receiver.server_port}/", requests
    receiver.shutdown()
    receiver.server_close()
    thread.join()


def train(server: Server, losses: list[float], **fields: object) -> WireClient:
    client = WireClient(server.url, server.token)
    assert client.register(**fields).status == 201
    body = client.batch(0, list(range(1, len(losses) + 1)), scalars={"loss": losses})
    assert client.send(body).status == 201
    return client


def test_it_works(server: Server, worker: Worker, received: tuple[str, list[tuple[str, bytes]]]) -> None:
    url, requests = received
    sealed = encrypt_json({"url": url, "secret": SECRET})
    Channel.objects.create(project=server.project, name="hook", sealed=sealed)
    client = train(server, [2.5, 2.31, math.nan, math.nan])
    wait_until(lambda: requests)
    ((signature, body),) = requests
    stamp, mac = (part.partition("=")[2] for part in signature.split(","))
    assert mac == hmac.new(SECRET.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
    assert json.loads(body)["message"] == "Loss became NaN at step 3; before, it was 2.31."

    answer = client.send(client.batch(1, [5], scalars={"loss": [math.nan]})).json
    (alert,) = answer["alerts"]
    assert (alert["kind"], alert["onset_step"], alert["value"]) == ("loss_not_finite", 3, None)
    later = client.request(
        "POST", f"/heartbeat?alerts_after={alert['id']}", json={"writer": str(client.writer)}
    )
    assert later.json["alerts"] == []
    wait_until(lambda: Delivery.objects.exclude(delivered_at=None).exists())
    assert len(requests) == 1


def test_verdicts_appear_without_a_request(server: Server, worker: Worker) -> None:
    level = [2.0 + 3.0 * math.exp(-step / 10.0) for step in range(60)]
    for seed in range(3):
        factor = 1.0 + 0.0005 * seed
        baseline = train(server, [factor * loss for loss in level], group="bf16", precision="bf16", seed=seed)
        assert evaluate(baseline, right=60 + seed).status == 201
        assert finish(baseline).status == 201
    run = train(server, [1.0005 * loss for loss in level], baseline="bf16", precision="fp8")
    assert evaluate(run, right=61).status == 201
    wait_until(lambda: Comparison.objects.filter(run=run.run, verdict="pending").exists())
    assert finish(run).status == 201

    wait_until(lambda: Comparison.objects.filter(run=run.run, verdict="equivalent").exists())
    wait_until(lambda: EvaluationComparison.objects.filter(run=run.run, verdict="equivalent").exists())
    answer = run.request("GET").json
    assert answer["comparison"]["verdict"] == "equivalent" and answer["comparison"]["k_baseline"] == 3
    assert answer["evaluations"][0]["verdict"] == "equivalent" and answer["events"] == []


def finish(client: WireClient) -> Answer:
    finish_message = {
        "writer": str(client.writer),
        "seq": 2,
        "state": "finished",
        "rows_sent": 60,
        "points_sent": 60,
    }
    return client.request("POST", "/finish", json=finish_message)


def evaluate(client: WireClient, right: int) -> Answer:
    scores = {"writer": str(client.writer), "seq": 1, "step": 60, "name": "heldout", "metric": "accuracy"}
    scores |= {"kind": "proportion", "items": [1] * right + [0] * (100 - right), "margin": 0.1}
    return client.request("POST", "/evaluations", json=scores)
