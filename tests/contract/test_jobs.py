"""A batch queues jobs, a real worker runs them, and the next answer carries their alerts."""

from __future__ import annotations

import math

from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server, Worker
from helpers.waiting import wait_until


def test_it_works(server: Server, worker: Worker) -> None:
    client = WireClient(server.url, server.token)
    client.register()
    body = client.batch(0, [1, 2, 3], scalars={"loss": [2.0, math.nan, math.nan]})
    assert client.send(body).json["alerts"] == []
    alerts: list[dict[str, object]] = []

    def ask() -> bool:
        answer = client.request("POST", "/heartbeat", json={"writer": str(client.writer)})
        alerts.extend(answer.json["alerts"])
        return bool(alerts)

    wait_until(ask, "the alert")
    assert [(alert["kind"], alert["onset_step"]) for alert in alerts] == [("loss_not_finite", 2)]
    assert b"Traceback" not in worker.log.read_bytes()
