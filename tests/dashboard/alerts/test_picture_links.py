"""The public address of an alert's chart: signed, expiring, of one delivery, and of its chart only."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import timedelta

import pytest
from apprise.plugins.slack import NotifySlack
from dashboard.helpers.alerting import make_hook
from dashboard.helpers.messages import MESSAGE, Receiver
from dashboard.helpers.recording import make_run
from django.conf import LazySettings
from django.core.signing import TimestampSigner
from django.test import Client
from PIL import Image

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.channels import service
from fp8scope_dashboard.alerts.delivery import message, picture_links
from fp8scope_dashboard.alerts.models import Alert, Delivery

pytestmark = pytest.mark.django_db
PUBLIC = "https://fp8scope.example.org"
PICTURE = f"{PUBLIC}/alert-pictures/signed.png"
SERIES = {"name": "loss", "steps": list(range(20)), "values": [2.0] * 19 + ["NaN"]}


@pytest.fixture
def delivery(settings: LazySettings) -> Delivery:
    settings.BASE_URL = PUBLIC
    project = create_project("default", "Default")
    event = Alert.objects.create(
        run=make_run(project, "secret name"),
        kind="loss_not_finite",
        severity="critical",
        message="Loss became NaN.",
        onset_step=19,
        step=19,
        evidence={"series": [SERIES]},
    )
    return Delivery.objects.create(event=event, channel=make_hook(project))


def path_of(address: str) -> str:
    assert address.startswith(f"{PUBLIC}/alert-pictures/") and address.endswith(".png")
    return address.removeprefix(PUBLIC)


def test_it_works(delivery: Delivery, client: Client) -> None:
    """Somebody without an account gets the picture, and nothing else."""
    answer = client.get(path_of(message.compose(delivery).chart_url))
    assert answer.status_code == 200 and answer["Content-Type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).size == (1200, 600)
    assert answer["X-Robots-Tag"] == "noindex, nofollow, noarchive"
    assert "Set-Cookie" not in answer.headers and "'none'" in answer["Content-Security-Policy"]


def test_addresses_that_are_not_genuine_look_alike(
    delivery: Delivery, client: Client, monkeypatch: pytest.MonkeyPatch, settings: LazySettings
) -> None:
    genuine = path_of(picture_links.address_of(delivery))
    key, stamp, signature = genuine.removeprefix("/alert-pictures/").removesuffix(".png").split(".")
    another = TimestampSigner(sep=".", salt="another use of the key").sign(key)
    forged = [f"{'0' * 32}.{stamp}.{signature}", f"{key}.zzzzzz.{signature}", another, key, "x", f"{key}."]
    for each in forged:
        assert client.get(f"/alert-pictures/{each}.png").status_code == 404, each
    assert client.post(genuine).status_code == 405
    monkeypatch.setattr(picture_links, "LIFETIME", timedelta(seconds=-1))
    assert client.get(genuine).status_code == 404
    monkeypatch.undo()
    assert client.get(genuine).status_code == 200
    settings.SECRET_KEY = "another installation's key"
    assert client.get(genuine).status_code == 404


def test_the_address_ends_with_the_channel(delivery: Delivery, client: Client) -> None:
    address = path_of(picture_links.address_of(delivery))
    delivery.channel.delete()
    assert client.get(address).status_code == 404


@pytest.mark.parametrize(
    ("base_url", "is_reachable"),
    [
        ("https://fp8scope.example.org", True),
        ("https://8.8.8.8:8443", True),
        ("http://fp8scope.example.org", False),
        ("http://127.0.0.1:8265", False),
        ("https://10.1.2.3", False),
        ("https://[fd00::1]", False),
        ("https://localhost", False),
        ("https://fp8scope", False),
        ("https://fp8scope.corp.internal.", False),
    ],
)
def test_only_public_servers_have_addresses(base_url: str, is_reachable: bool) -> None:
    assert picture_links.is_reachable(base_url) is is_reachable


def test_a_message_without_a_chart_has_no_address(delivery: Delivery, settings: LazySettings) -> None:
    settings.BASE_URL = "http://127.0.0.1:8265"
    assert message.compose(delivery).chart_url == ""
    settings.BASE_URL = PUBLIC
    Alert.objects.update(evidence={})
    assert message.compose(Delivery.objects.get()).chart_url == ""


@pytest.mark.parametrize("blocks", ["", "?blocks=yes"])
def test_slack_shows_the_picture(receiver: Receiver, monkeypatch: pytest.MonkeyPatch, blocks: str) -> None:
    """An incoming webhook takes no file."""
    monkeypatch.setattr(NotifySlack, "webhook_url", receiver.url)
    receiver.body = b"ok"
    config = {"url": f"slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7fQ/{blocks}"}
    drawn = replace(MESSAGE, chart_url=PICTURE, draw_chart=lambda: pytest.fail("It takes no file."))
    service.send(config, drawn)
    ((path, _, body),) = receiver.requests
    (attachment,) = json.loads(body)["attachments"]
    assert path == "/hook/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7fQ"
    if blocks:
        assert attachment["blocks"][-1] == {"type": "image", "image_url": PICTURE, "alt_text": "Chart"}
    else:
        assert attachment["image_url"] == PICTURE and PICTURE in attachment["text"]


def test_teams_shows_the_picture() -> None:
    plugin = service._plugin("workflows://prod-1.logic.azure.com:443/0123456789abcdef/abcdefghijkl/")
    service.show_picture(plugin, PICTURE)
    payload = plugin.gen_payload("The body", "The title")  # type: ignore[attr-defined]
    picture = payload["attachments"][0]["content"]["body"][-1]
    assert (picture["type"], picture["url"]) == ("Image", PICTURE)


def test_other_services_get_a_link(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = replace(MESSAGE, chart_url=PICTURE, draw_chart=lambda: None)
    service.send({"url": receiver.url.replace("http://", "json://")}, drawn)
    assert f"Chart: {PICTURE}" in json.loads(receiver.requests[0][2])["message"]
