"""The address of a webhook is a secret: no page, answer, export, delivery or log line contains it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.test import Client

from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.alerts.channels import CHANNELS, ChannelMessage
from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery

PATH = "T0SECRET/B0SECRET/x0SECRET"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def channel(admin: Visitor, seeded: Seeded) -> Channel:
    """A webhook whose server does not answer, and the pending delivery of an alert to it."""
    url = f"http://127.0.0.1:{closed_port()}/services/{PATH}?token={PATH}"
    data = {"name": "on-call", "url": url, "secret": f"sign {PATH}"}
    admin.client.post(admin.address("channels/new/webhook"), data)
    channel = Channel.objects.get()
    event = Alert.objects.filter(run=seeded.faulty).first()
    assert event is not None and channel.config["url"] == url
    outbox.enqueue(event)
    return channel


def all_texts(visitor: Visitor, seeded: Seeded) -> str:
    """The text of all pages and API answers of a project."""
    run = f"runs/{seeded.faulty.id}/"
    pages = (
        "",
        run,
        f"{run}data/",
        "compare/",
        "evaluations/",
        "alerts/?state=all",
        "settings/",
        "channels/",
    )
    texts = [visitor.client.get(visitor.address(rest)).content.decode() for rest in pages]
    _, secret = create_token(visitor.project, "tests", scopes=("write", "read"))
    headers = {"Authorization": f"Bearer {secret}"}
    for rest in ("", "/export?format=csv", "/series?scalars=loss"):
        answer = Client().get(f"/api/v1/runs/{seeded.faulty.id}{rest}", headers=headers)
        texts.append(
            b"".join(answer).decode() if getattr(answer, "streaming", False) else answer.content.decode()
        )
    return "\n".join(texts)


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
@pytest.mark.parametrize("role", ["admin", "viewer"])
def test_it_works(
    request: pytest.FixtureRequest,
    admin: Visitor,
    seeded: Seeded,
    channel: Channel,
    role: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        (delivery,) = Delivery.objects.all()
        assert outbox.deliver(delivery.pk) is False
    shown = all_texts(request.getfixturevalue(role), seeded)
    assert "on-call" in shown and "http://127.0.0.1" in shown and "/****" in shown
    assert "could not be reached" in shown
    delivery.refresh_from_db()
    for text in (shown, caplog.text, delivery.last_error, json.dumps(list(Alert.objects.values("evidence")))):
        assert "0SECRET" not in text and "services/" not in text


def test_an_unexpected_error_is_logged_without_its_message(
    seeded: Seeded, channel: Channel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def send(config: Mapping[str, Any], message: ChannelMessage) -> None:
        raise UnicodeError(f"cannot send to {config['url']}")

    monkeypatch.setitem(CHANNELS, "webhook", replace(CHANNELS["webhook"], send=send))
    (delivery,) = Delivery.objects.all()
    assert outbox.deliver(delivery.pk) is False
    delivery.refresh_from_db()
    assert delivery.last_error.startswith("Unexpected UnicodeError")
    assert "UnicodeError" in caplog.text and "in send" in caplog.text
    assert "0SECRET" not in caplog.text + delivery.last_error


def test_only_an_administrator_can_replace_an_address(
    admin: Visitor, member: Visitor, viewer: Visitor, seeded: Seeded, channel: Channel
) -> None:
    address = f"channels/{channel.pk}"
    new = {"action": "replace", "url": "https://new.test/other0SECRET"}
    for visitor in (member, viewer):
        assert visitor.client.post(visitor.address(address), new).status_code == 403
    page = admin.client.post(admin.address(address), new, follow=True).content.decode()
    channel.refresh_from_db()
    assert channel.config == {"url": new["url"]}
    assert "https://new.test/****" in page and "not signed" in page and "0SECRET" not in page
    bad = {"action": "replace", "url": "ftp://other0SECRET"}
    page = admin.client.post(admin.address(address), bad, follow=True).content.decode()
    channel.refresh_from_db()
    assert channel.config["url"] == new["url"] and "notice--error" in page and "0SECRET" not in page
