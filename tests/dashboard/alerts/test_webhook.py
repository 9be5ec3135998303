"""The webhook channel against a real HTTP server: its requests, and how it handles each response."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest
from dashboard.helpers import certificates
from dashboard.helpers.messages import MESSAGE, NOTICE, Receiver
from django.conf import LazySettings

from fp8scope_dashboard.alerts.channels import DeliveryError, outgoing, webhook
from fp8scope_dashboard.text.numbers import json_number


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


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("120", 120.0), ("999999", webhook.LONGEST_WAIT), ("soon", 0.0), ("-5", 0.0), ("", 0.0), ("١", 0.0)],
)
def test_a_receiver_may_ask_to_wait(receiver: Receiver, header: str, seconds: float) -> None:
    receiver.status, receiver.headers = 429, {"Retry-After": header.encode().decode("latin-1")}
    with pytest.raises(DeliveryError, match="429") as caught:
        webhook.send({"url": receiver.url}, MESSAGE)
    assert caught.value.retry_after == seconds and not caught.value.permanent


def test_a_receiver_may_name_a_time(receiver: Receiver) -> None:
    receiver.status, receiver.headers = 503, {"Retry-After": formatdate(time.time() + 300, usegmt=True)}
    with pytest.raises(DeliveryError) as caught:
        webhook.send({"url": receiver.url}, MESSAGE)
    assert 290 < caught.value.retry_after <= 300


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_does_not_have_are_strings(receiver: Receiver, value: float) -> None:
    notice = replace(NOTICE, value=value, threshold=value, tensors=[{"name": "x", "rate": value}])
    webhook.send({"url": receiver.url}, replace(MESSAGE, notices=(notice,)))

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    content = json.loads(receiver.requests[0][2], parse_constant=refuse)
    assert content["value"] == content["threshold"] == content["tensors"][0]["rate"] == json_number(value)


@contextmanager
def endless_receiver(beginning: bytes, *, repeat: bytes) -> Iterator[str]:
    """A receiver that never ends its answer; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(beginning)
                while not stop.wait(0.05):
                    connection.sendall(repeat)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        stop.set()
        thread.join()


def test_a_body_without_an_end_is_not_read() -> None:
    with endless_receiver(b"HTTP/1.1 200 OK\r\n\r\n", repeat=b"x" * 4096) as url:
        webhook.send({"url": url}, MESSAGE)


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "DEADLINE", 0.5)
    with (
        endless_receiver(b"", repeat=b"x") as url,
        pytest.raises(DeliveryError, match="did not end its answer") as caught,
    ):
        webhook.send({"url": url}, MESSAGE)
    assert not caught.value.permanent


def test_a_certificate_that_is_not_accepted_says_so(tmp_path: Path) -> None:
    with https_server(tmp_path) as url, pytest.raises(DeliveryError, match="certificate") as caught:
        webhook.send({"url": url}, MESSAGE)
    assert not caught.value.permanent


@contextmanager
def https_server(folder: Path) -> Iterator[str]:
    """A server with a certificate that nobody has signed; its address."""
    context = certificates.unsigned(folder)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def handshake() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=handshake)
        thread.start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}/"
        thread.join()


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


@pytest.mark.parametrize("host", ["hooks.slack.com", "discord.com"])
def test_the_address_of_a_service_is_no_webhook(host: str) -> None:
    with pytest.raises(DeliveryError, match="add a service with this address"):
        webhook.check_config({"url": f"https://{host}/services/T1/B2/x"})
