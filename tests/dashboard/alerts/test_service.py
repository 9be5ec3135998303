"""Services of Apprise, against a real receiver of its json:// service."""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from apprise import Apprise, AppriseAttachment
from dashboard.helpers.messages import MESSAGE, NOTICE, Receiver, free_port
from django.conf import LazySettings

from fp8scope_dashboard.alerts.channels import DeliveryError, outgoing, service
from fp8scope_dashboard.alerts.channels.outgoing import restricted

PNG = b"\x89PNG\r\n\x1a\n only the beginning of one"


def attribute(plugin: object, name: str) -> object:
    """An attribute that only some services have."""
    return getattr(plugin, name)


def read(attachment: Any) -> bytes:
    """The content of an attachment, whose methods have no types."""
    with attachment.open() as stream:
        return bytes(stream.read())


def url(receiver: Receiver, query: str = "") -> str:
    return receiver.url.replace("http://", "json://") + query


def test_it_works(receiver: Receiver) -> None:
    service.send({"url": url(receiver)}, replace(MESSAGE, draw_chart=lambda: PNG))
    ((path, _, body),) = receiver.requests
    content = json.loads(body)
    assert path.startswith("/hook") and content["title"] == "Loss not finite in gpt [critical]"
    assert content["type"] == "failure" and NOTICE.message in content["message"]
    (attachment,) = content["attachments"]
    assert attachment["mimetype"] == "image/png" and base64.b64decode(attachment["base64"]) == PNG


@pytest.mark.parametrize(
    ("severity", "reason", "shown"),
    [
        ("critical", "opened", "failure"),
        ("warning", "opened", "warning"),
        ("critical", "resolved", "success"),
    ],
)
def test_the_severity_is_passed_on(receiver: Receiver, severity: str, reason: str, shown: str) -> None:
    notice = replace(NOTICE, severity=severity, reason=reason)
    service.send({"url": url(receiver)}, replace(MESSAGE, notices=(notice,)))
    assert json.loads(receiver.requests[0][2])["type"] == shown


@pytest.mark.parametrize(("status", "permanent"), [(500, False), (429, False), (404, True), (410, True)])
def test_a_refusal_is_an_error(receiver: Receiver, status: int, permanent: bool) -> None:
    receiver.status = status
    with pytest.raises(DeliveryError, match=str(status)) as caught:
        service.send({"url": url(receiver)}, MESSAGE)
    assert caught.value.permanent is permanent and len(receiver.requests) == 1


def test_redirects_are_not_followed(receiver: Receiver) -> None:
    receiver.status, receiver.headers = 307, {"Location": receiver.url.replace("hook", "elsewhere")}
    for query in ("", "?redirect=yes"):
        with pytest.raises(DeliveryError):
            service.send({"url": url(receiver, query)}, MESSAGE)
    assert all(path.startswith("/hook") for path, _, _ in receiver.requests)


def test_private_addresses_are_refused(receiver: Receiver, settings: LazySettings) -> None:
    settings.CHANNEL_NETWORKS = []
    # Chats that people host themselves, and one that Apprise would reach by UDP or TCP.
    host = url(receiver).removeprefix("json://").partition("/")[0]
    for address in (
        url(receiver),
        f"gotify://{host}/token",
        f"mmost://{host}/aaaaaaaaaaaaaaaaaaaaaaaa",
        f"ntfy://{host}/t",
    ):
        with pytest.raises(DeliveryError, match="private address") as caught:
            service.send({"url": address}, MESSAGE)
        assert caught.value.permanent
    assert not receiver.requests


def test_local_files_are_not_read(tmp_path: Path) -> None:
    """A URL may name a template or a key file, which Apprise reads as an attachment."""
    template = tmp_path / "template.json"
    template.write_text('{"text": "from the file"}')
    attachment = AppriseAttachment(str(template))[0]
    assert b"from the file" in read(attachment)
    with restricted(files=False), pytest.raises(PermissionError):
        read(attachment)


def test_a_receiver_that_is_down_is_tried_again() -> None:
    with pytest.raises(DeliveryError, match="could not be reached") as caught:
        service.send({"url": f"json://127.0.0.1:{free_port()}/token-in-path"}, MESSAGE)
    assert not caught.value.permanent and "token" not in str(caught.value)


def test_the_url_cannot_extend_the_time(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "READ_SECONDS", 0.3)
    receiver.hang = threading.Event()
    # The receiver would answer after 30 s, and then there would be no error.
    with pytest.raises(DeliveryError):
        service.send({"url": url(receiver, "?rto=60&cto=60")}, MESSAGE)
    assert not receiver.hang.is_set()


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "DEADLINE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while connection.send(b"x"):
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(DeliveryError) as caught:
            service.send({"url": f"json://127.0.0.1:{listening.getsockname()[1]}/"}, MESSAGE)
        assert not caught.value.permanent
        thread.join(20)
        assert not thread.is_alive()


def test_nothing_is_logged(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.status = 500
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(DeliveryError):
            service.send({"url": url(receiver, "/T0SECRET")}, MESSAGE)
        with pytest.raises(DeliveryError):
            service.check_config({"url": "slack://T0SECRET"})
    assert not [record for record in caplog.records if record.name.startswith("apprise")]
    assert logging.getLogger("apprise").propagate


@pytest.mark.parametrize(
    ("address", "shown"),
    [("slack://T0SECRET/x", "slack://****"), ("T0SECRET", "****"), ("a b://x", "****"), (None, "****")],
)
def test_only_the_service_is_shown(address: object, shown: str) -> None:
    assert service.masked({"url": address}) == shown


SLACK_HOOK = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
TEAMS_FLOW = (
    "https://prod-00.westeurope.logic.azure.com:443/workflows/643e69f83c8944/triggers/manual/paths/invoke"
    "?api-version=2016-06-01&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0&sig=abcd"
)


@pytest.mark.parametrize("address", [SLACK_HOOK, TEAMS_FLOW, "https://discord.com/api/webhooks/123/abc"])
def test_takes_the_address_that_a_service_gives(address: str) -> None:
    service.check_config({"url": address})
    shown = service.masked({"url": address})
    assert shown.endswith("/****") and (urlsplit(address).hostname or "?") in shown and "abc" not in shown


def test_says_where_an_unknown_address_belongs() -> None:
    with pytest.raises(DeliveryError, match="add a webhook"):
        service.check_config({"url": "https://example.org/hook"})


def test_notices_of_one_alert_have_one_key_at_paging_services() -> None:
    url = "pagerduty://ABCDEFGHIJKLMNOPQRSTUVWXYZ012345@abcdefghijklmnopqrstuvwxyz012345"
    pager = Apprise.instantiate(url)
    assert pager is not None
    service.join_notices(pager, MESSAGE)
    assert attribute(pager, "dedup") == NOTICE.alert and attribute(pager, "action") != "resolve"
    service.join_notices(pager, replace(MESSAGE, notices=(replace(NOTICE, reason="resolved"),)))
    assert attribute(pager, "dedup") == NOTICE.alert and attribute(pager, "action") == "resolve"
    named = Apprise.instantiate(f"{url}/?dedup=mine")
    assert named is not None
    service.join_notices(named, MESSAGE)
    assert attribute(named, "dedup") == "mine"


def test_opsgenie_opens_tests_and_closes_by_the_key(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, settings: LazySettings
) -> None:
    from apprise.plugins import opsgenie

    for region in opsgenie.OPSGENIE_API_LOOKUP:
        monkeypatch.setitem(opsgenie.OPSGENIE_API_LOOKUP, region, receiver.url)
    receiver.status, receiver.body = 202, b'{"requestId": "one"}'
    config = {"url": "opsgenie://0123456789abcdef0123456789abcdef0123"}
    ended = replace(MESSAGE, notices=(replace(NOTICE, reason="resolved"),))
    for message in (replace(MESSAGE, notices=()), MESSAGE, ended):
        service.send(config, message)
    test, opened, closed = receiver.requests
    assert "alias" not in json.loads(test[2]) and json.loads(opened[2])["alias"] == NOTICE.alert
    assert closed[0].endswith(f"/{quote(NOTICE.alert, safe='')}/close?identifierType=alias")
    receiver.status = 401
    with pytest.raises(DeliveryError, match="401"):
        service.send(config, replace(MESSAGE, notices=()))
