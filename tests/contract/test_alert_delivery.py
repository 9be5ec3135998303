"""From a stored NaN to a mail with a chart, and to a webhook that accepts only the third attempt.

Web server, Celery worker, SMTP server and the webhook's receiver are real.
"""

from __future__ import annotations

import io
import json
import math
from datetime import timedelta

import pytest
from contract.helpers.wire_client import WireClient
from dashboard.helpers.messages import http_receiver, smtp_receiver
from django.db.models import F
from helpers.live_servers import Server, Worker
from helpers.waiting import wait_until
from PIL import Image

from fp8scope_dashboard.alerts.models import Channel, Delivery
from fp8scope_dashboard.alerts.tasks import deliver_due
from fp8scope_dashboard.db.encryption import encrypt_json

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_works(server: Server, worker: Worker) -> None:
    with smtp_receiver() as mailbox, http_receiver() as receiver:
        receiver.statuses = [500, 503]
        mail = {"to": "ada@example.org", "server": f"smtp+plain://127.0.0.1:{mailbox.port}"}
        for name, kind, config in (("mail", "email", mail), ("hook", "webhook", {"url": receiver.url})):
            Channel.objects.create(project=server.project, name=name, kind=kind, sealed=encrypt_json(config))
        client = WireClient(server.url, server.token)
        client.register(name="gpt")
        losses = [2.5 - 0.01 * step for step in range(30)]
        client.send(client.batch(0, list(range(30)), scalars={"loss": losses}))
        client.send(client.batch(1, [30], scalars={"loss": [math.nan]}))
        wait_until(lambda: mailbox.mails, "the mail")
        for attempts in (1, 2):
            # The pauses between attempts are 10 and 20 s: let them pass.
            hook = Delivery.objects.filter(channel__kind="webhook", attempts=attempts, claimed_at=None)
            wait_until(hook.exists, f"the end of attempt {attempts}")
            hook.update(due_at=F("due_at") - timedelta(minutes=1))
            deliver_due.delay()
        wait_until(lambda: not Delivery.objects.filter(delivered_at=None).exists(), "both deliveries")
    ((recipients, message),) = mailbox.mails
    assert recipients == ["ada@example.org"]
    assert message["Subject"] == "Loss not finite in gpt [critical]"
    (chart,) = [part for part in message.walk() if part.get_content_type() == "image/png"]
    assert Image.open(io.BytesIO(chart.get_content())).size == (1200, 600)
    delivery = Delivery.objects.get(channel__kind="webhook")
    assert delivery.attempts == 3 and delivery.last_error == ""
    bodies = [json.loads(body) for _, _, body in receiver.requests]
    keys = [headers["Idempotency-Key"] for _, headers, _ in receiver.requests]
    assert keys == [str(delivery.key)] * 3
    assert [body["message"] for body in bodies] == ["Loss became NaN at step 30; before, it was 2.21."] * 3
