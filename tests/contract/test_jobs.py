"""A batch queues jobs, a real worker runs them, and the next answer carries their alerts."""

from __future__ import annotations

import math
import time

from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server, Worker

WAIT_SECONDS = 60


def test_it_works(server: Server, worker: Worker) -> None:
    client = WireClient(server.url, server.token)
    client.register()
    body = client.batch(0, [1, 2, 3], scalars={"loss": [2.0, math.nan, math.nan]})
    assert client.send(body).json["alerts"] == []
    deadline = time.monotonic() + WAIT_SECONDS
    alerts: list[dict[str, object]] = []
    while not alerts and time.monotonic() < deadline:
        time.sleep(0.1)
        alerts = client.request("POST", "/heartbeat", json={"writer": str(client.writer)}).json["alerts"]
    assert [(alert["kind"], alert["onset_step"]) for alert in alerts] == [("loss_not_finite", 2)]
    assert b"Traceback" not in worker.log.read_bytes()
