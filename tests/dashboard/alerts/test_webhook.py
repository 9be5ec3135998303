"""The webhook channel against a real HTTP server: its requests, and how it handles each response."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from dashboard.helpers.messages import MESSAGE, NOTICE, Receiver, http_receiver
from django.conf import LazySettings

from fp8scope_dashboard.alerts.delivery.channels import DeliveryError, webhook


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as receiver:
        yield receiver


def test_it_works(receiver: Receiver) -> None:
    webhook.send({"url": receiver.url, "secret": "s3cret"}, MESSAGE)
    ((path, headers, body),) = receiver.requests
    assert path == "/hook" and headers["Content-Type"] == "application/json"
    content = json.loads(body)
    assert content["message"] == NOTICE.message and content["delivery"] == 5
    assert content["key"] == headers["Idempotency-Key"] == MESSAGE.key
    assert content["opened_at"] == "2026-01-01T00:00:00+00:00"
    stamp, signature = headers["Fp8scope-Signature"].split(",")
    assert abs(int(stamp.removeprefix("t=")) - time.time()) < 60
    expected = hmac.new(b"s3cret", stamp.removeprefix("t=").encode() + b"." + body, hashlib.sha256)
    assert signature == f"v1={expected.hexdigest()}"


def test_without_a_secret_there_is_no_signature(receiver: Receiver) -> None:
    webhook.send({"url": receiver.url}, MESSAGE)
    assert webhook.SIGNATURE_HEADER not in receiver.requests[0][1]


@pytest.mark.parametrize(
    ("status", "permanent"),
    [(500, False), (503, False), (429, False), (400, False), (404, True), (410, True)],
)
def test_a_refusal_is_an_error(receiver: Receiver, status: int, permanent: bool) -> None:
    receiver.status = status
    with pytest.raises(DeliveryError, match=str(status)) as caught:
        webhook.send({"url": receiver.url}, MESSAGE)
    assert caught.value.permanent is permanent
    assert len(receiver.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(receiver: Receiver, status: int) -> None:
    receiver.status = status
    receiver.headers = {"Location": receiver.url.replace("/hook", "/elsewhere")}
    with pytest.raises(DeliveryError, match="redirect") as caught:
        webhook.send({"url": receiver.url}, MESSAGE)
    assert caught.value.permanent
    assert [path for path, _, _ in receiver.requests] == ["/hook"]


def test_a_receiver_that_hangs_times_out(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "READ_SECONDS", 0.2)
    receiver.hang = threading.Event()
    with pytest.raises(DeliveryError, match="did not answer") as caught:
        webhook.send({"url": receiver.url}, MESSAGE)
    assert not caught.value.permanent
    assert not receiver.hang.is_set()


def test_a_refused_connection_names_no_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DeliveryError, match="could not be reached") as caught:
        webhook.send({"url": f"http://127.0.0.1:{port}/token-in-path"}, MESSAGE)
    assert not caught.value.permanent
    assert "token" not in str(caught.value)


def test_a_receiver_that_does_not_speak_http_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def babble() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"hello\r\n\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(DeliveryError, match="could not be reached"):
            webhook.send({"url": f"http://127.0.0.1:{listening.getsockname()[1]}/"}, MESSAGE)
        thread.join()


@pytest.mark.parametrize(
    "url",
    ["", "example.org", "ftp://example.org/", "file:///etc/passwd", "http://", "http://host:99999/", 7, None],
)
def test_an_invalid_url_is_a_permanent_error(url: object) -> None:
    with pytest.raises(DeliveryError) as caught:
        webhook.send({"url": url}, MESSAGE)
    assert caught.value.permanent


def test_refuses_a_password_in_the_url() -> None:
    with pytest.raises(DeliveryError, match="secret") as caught:
        webhook.check_config({"url": "https://user:hunter2@example.org/"})
    assert "hunter2" not in str(caught.value)


def test_the_body_is_bounded(receiver: Receiver) -> None:
    tensors = [{"name": "x" * 512, "rate": 0.5, "onset_step": 1} for _ in range(1000)]
    webhook.send({"url": receiver.url}, replace(MESSAGE, notices=(replace(NOTICE, tensors=tensors),)))
    body = receiver.requests[0][2]
    assert len(body) <= webhook.BODY_BYTES
    assert 0 < len(json.loads(body)["tensors"]) < 1000


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hook.test/services/T0/B0/secret", "https://hook.test/****"),
        ("http://hook.test:8080/x?key=secret#secret", "http://hook.test:8080/****"),
        ("https://hook.test", "https://hook.test/****"),
        ("nonsense-secret", "****"),
        ("https://u:secret@hook.test/", "****"),
    ],
)
def test_only_the_host_of_an_address_is_shown(url: str, shown: str) -> None:
    assert webhook.masked({"url": url, "secret": "secret"}) == shown


def test_a_digest_has_every_alert_with_its_key(receiver: Receiver) -> None:
    notices = tuple(replace(NOTICE, delivery=i, key=f"key {i}", event=i) for i in range(3))
    webhook.send({"url": receiver.url}, replace(MESSAGE, notices=notices))
    _, headers, body = receiver.requests[0]
    content = json.loads(body)
    assert content["digest"] and content["key"] == headers["Idempotency-Key"] == MESSAGE.key
    assert [alert["key"] for alert in content["alerts"]] == ["key 0", "key 1", "key 2"]


def test_a_test_is_no_alert(receiver: Receiver) -> None:
    webhook.send({"url": receiver.url}, replace(MESSAGE, notices=()))
    assert json.loads(receiver.requests[0][2]) == {
        "test": True,
        "key": MESSAGE.key,
        "project": "default",
        "url": MESSAGE.url,
    }


def test_a_private_address_is_refused(receiver: Receiver, settings: LazySettings) -> None:
    settings.CHANNEL_NETWORKS = []
    for url in (receiver.url, receiver.url.replace("127.0.0.1", "localhost")):
        with pytest.raises(DeliveryError, match="private address") as caught:
            webhook.send({"url": url}, MESSAGE)
        assert caught.value.permanent
    assert not receiver.requests
