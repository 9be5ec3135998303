"""The real agent at its defaults: an alert reaches the script with the next message, and so do orders."""

from __future__ import annotations

import math
import time
from pathlib import Path
from uuid import UUID

import pytest
from dashboard.helpers.messages import http_receiver
from dashboard.helpers.visitors import visitor_of
from helpers.live_servers import Server, Worker
from helpers.waiting import wait_until

import fp8scope
from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.alerts.models import Alert, Channel, Rule, RuleAction
from fp8scope_dashboard.control.models import CommandResult
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.receipts.models import Receipt

pytestmark = pytest.mark.django_db(transaction=True)
MAX_STEPS = 2_000


def test_it_works(server: Server, worker: Worker, tmp_path: Path) -> None:
    Rule.objects.filter(project=server.project, kind="loss_not_finite").update(action=RuleAction.CHECKPOINT)
    alerts: list[tuple[fp8scope.Alert, int]] = []
    checkpoints: list[int] = []

    def save(command: object) -> str:
        checkpoints.append(number)
        return "saved as step.pt"

    with http_receiver() as receiver:
        sealed = encrypt_json({"url": receiver.url})
        Channel.objects.create(project=server.project, name="hook", sealed=sealed)
        run = fp8scope.init(name="gpt", url=server.url, token=server.token, directory=str(tmp_path))
        run.on_alert(lambda alert: alerts.append((alert, Receipt.objects.filter(run=UUID(run.id)).count())))
        run.on_command("checkpoint", save)
        stored_when_notified: list[int] = []
        for number in range(MAX_STEPS):
            with run.step() as step:
                step.log(loss=math.nan if number == 30 else 2.0)
            time.sleep(0.02)
            # The webhook gets it after the commit: from here on every answer has the alert.
            if receiver.requests and not stored_when_notified:
                stored_when_notified.append(Receipt.objects.filter(run=UUID(run.id)).count())
            # On a busy machine the webhook may come after the answer.
            if alerts and checkpoints and stored_when_notified:
                break
        assert run.finish().complete
    ((alert, stored),) = alerts
    assert (alert.kind, alert.severity, alert.onset_step) == ("loss_not_finite", "critical", 31)
    assert stored - stored_when_notified[0] <= 1
    assert len(checkpoints) == 1
    event = Alert.objects.get(run=UUID(run.id), kind="loss_not_finite")
    wait_until(lambda: CommandResult.objects.filter(command__event=event).exists(), "the result")
    viewer = visitor_of(server.project, "ada", Role.VIEWER)
    page = viewer.client.get(viewer.address(f"alerts/{event.pk}/")).content.decode()
    assert "Write a checkpoint" in page and "saved as step.pt" in page
