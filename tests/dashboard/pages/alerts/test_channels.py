"""The page of alert channels: add, change and test them, and send failed deliveries again."""

from __future__ import annotations

import socket

import pytest
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.conf import LazySettings
from django.utils import timezone

from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery
from fp8scope_dashboard.db.encryption import UnreadableSecretError, encrypt_json
from fp8scope_dashboard.pages.alerts.channels import MAX_CHANNELS


def post(visitor: Visitor, rest: str, **data: str) -> str:
    """Submit a form; returns the page that follows, with its messages."""
    return visitor.client.post(visitor.address(f"channels/{rest}"), data, follow=True).content.decode()


def html(visitor: Visitor) -> str:
    return visitor.client.get(visitor.address("channels/")).content.decode()


@pytest.fixture
def hook(admin: Visitor) -> Channel:
    """A webhook that nobody listens to."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
    return Channel.objects.create(project=admin.project, name="hook", sealed=encrypt_json({"url": url}))


def test_it_works(admin: Visitor) -> None:
    page = post(
        admin, "new/webhook", name="on-call", url="https://hook.test/x?key=private", secret="very secret"
    )
    channel = Channel.objects.get()
    assert channel.config == {"url": "https://hook.test/x?key=private", "secret": "very secret"}
    assert "https://hook.test/****" in page and "private" not in page and "very secret" not in page
    post(admin, f"{channel.pk}", action="disable")
    channel.refresh_from_db()
    assert not channel.enabled
    post(admin, f"{channel.pk}", action="enable")
    post(admin, f"{channel.pk}", action="nonsense")
    channel.refresh_from_db()
    assert channel.enabled
    post(admin, f"{channel.pk}", action="remove")
    assert not Channel.objects.exists()


def test_adding_a_channel_can_send_a_test(admin: Visitor) -> None:
    page = post(admin, "new/webhook", name="a", url="https://hook.test/a", test="1")
    assert "Added the channel “a”, and sent it a test." in page and "The test is being sent…" in page
    page = post(admin, "new/webhook", name="b", url="https://hook.test/b")
    assert "Added the channel “b”. Send a test to see whether it works." in page
    post(admin, "new/webhook", name="refused", url="nonsense", test="1")
    assert [(test.channel.name, test.reason) for test in Delivery.objects.all()] == [("a", "test")]


def test_adds_mail_and_other_services(admin: Visitor) -> None:
    server = "smtps://me:p%40ssword@mail.test"
    page = post(admin, "new/email", name="team", to="private1@x.test; private2@y.test", server=server)
    page += post(admin, "new/service", name="#training", url="slack://TokenAAAA/BBBBBBBB/CccccDdddd")
    page += html(admin)
    mail, chat = Channel.objects.order_by("id")
    assert mail.config["server"] == server and chat.config["url"].startswith("slack://TokenAAAA")
    assert "****@x.test, ****@y.test" in page and "slack://****" in page
    for secret in ("private", "p%40ssword", "mail.test", "TokenAAAA", "CccccDdddd"):
        assert secret not in page


@pytest.mark.parametrize("url", ["", "ftp://x.test", "https://", "https://u:p@x.test", "x" * 3000])
def test_refuses_an_invalid_webhook_address(admin: Visitor, url: str) -> None:
    assert "notice--error" in post(admin, "new/webhook", name="x", url=url)
    assert not Channel.objects.exists()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("email", {"to": "", "server": "smtp://mail.test"}),
        ("email", {"to": "nobody", "server": "smtp://mail.test"}),
        ("email", {"to": "a@x.test"}),
        ("email", {"to": "a@x.test", "server": "mail.test"}),
        ("email", {"to": "a@x.test", "server": "smtp://user@mail.test"}),
        ("email", {"to": ",".join(f"a{i}@x.test" for i in range(51)), "server": "smtp://mail.test"}),
        ("service", {"url": ""}),
        ("service", {"url": "nonsense://x"}),
        ("service", {"url": "syslog://localhost"}),
        ("service", {"url": "mailto://user:pass@x.test"}),
        ("service", {"url": "jsons://x.test?verify=no"}),
    ],
)
def test_refuses_invalid_settings(admin: Visitor, kind: str, data: dict[str, str]) -> None:
    assert "notice--error" in post(admin, f"new/{kind}", name="x", **data)
    assert not Channel.objects.exists()


def test_an_unknown_kind_is_not_found(admin: Visitor) -> None:
    assert admin.client.post(admin.address("channels/new/fax"), {}).status_code == 404


def test_limits_the_number_of_channels(admin: Visitor) -> None:
    for i in range(MAX_CHANNELS):
        Channel.objects.create(project=admin.project, name=str(i))
    assert "Remove one first" in post(admin, "new/webhook", name="x", url="https://x.test")
    assert Channel.objects.count() == MAX_CHANNELS


def test_changes_the_options(admin: Visitor, hook: Channel) -> None:
    options = {"action": "options", "name": "pager", "least_severity": "critical", "send_resolved": "1"}
    page = post(admin, f"{hook.pk}", per_minute="3", **options)
    hook.refresh_from_db()
    assert (hook.name, hook.least_severity, hook.per_minute) == (
        "pager",
        "critical",
        3,
    ) and hook.send_resolved
    assert "Only critical alerts, and a notice when an alert ends" in page


@pytest.mark.parametrize("per_minute", ["0", "601", "-1", "1.5", "many", "9" * 30])
def test_refuses_a_limit_out_of_bounds(admin: Visitor, hook: Channel, per_minute: str) -> None:
    page = post(admin, f"{hook.pk}", action="options", per_minute=per_minute)
    assert "whole number from 1 to 600" in page
    hook.refresh_from_db()
    assert hook.per_minute == 10


def test_a_test_shows_its_result(admin: Visitor, hook: Channel) -> None:
    page = post(admin, f"{hook.pk}", action="test")
    assert "The test is being sent" in page and 'hx-trigger="every 1s"' in page
    assert '<p class="small muted" role="status">' in page
    delivery = Delivery.objects.get()
    assert not outbox.deliver(delivery.pk)
    page = html(admin)
    assert "The test failed" in page and "could not be reached" in page and "every 1s" not in page
    assert '<p class="small notice notice--error" role="status">' in page
    Delivery.objects.update(failed_at=None, delivered_at=timezone.now())
    page = html(admin)
    assert "The test was accepted" in page
    assert '<p class="small notice notice--success" role="status">' in page
    post(admin, f"{hook.pk}", action="test")
    # A new test replaces the former one.
    assert Delivery.objects.get().pk != delivery.pk


def test_a_failed_delivery_can_be_sent_again(
    admin: Visitor, member: Visitor, viewer: Visitor, seeded: Seeded, hook: Channel
) -> None:
    events = Alert.objects.filter(run=seeded.faulty)
    fields = {"failed_at": timezone.now(), "attempts": 8, "last_error": "The receiver answered 500."}
    failed = [Delivery.objects.create(event=event, channel=hook, **fields) for event in events[:2]]
    page = html(member)
    assert page.count("The receiver answered 500.") == len(failed) and "Send again" in page
    assert "Send again" not in html(viewer)
    keys = {delivery.key for delivery in failed}
    assert "Sending 1 message again" in post(member, f"{hook.pk}/again", delivery=str(failed[0].pk))
    failed[0].refresh_from_db()
    assert failed[0].failed_at is None and failed[0].attempts == 0
    for nonsense in ("x", "9" * 40):
        assert "Sending 0 messages again" in post(member, f"{hook.pk}/again", delivery=nonsense)
    assert f"Sending {len(failed) - 1} message" in post(member, f"{hook.pk}/again")
    assert not Delivery.objects.exclude(failed_at=None).exists()
    assert {delivery.key for delivery in Delivery.objects.all()} == keys


def test_a_lost_key_is_explained(admin: Visitor, hook: Channel, settings: LazySettings) -> None:
    settings.SECRET_KEY = "another key"
    # The key also signs sessions.
    admin.client.force_login(admin.user)
    page = html(admin)
    assert "encrypted with another secret key" in page and "127.0.0.1" not in page
    post(admin, f"{hook.pk}", action="replace", url="https://new.test/x")
    hook.refresh_from_db()
    assert hook.config == {"url": "https://new.test/x"}
    assert "https://new.test/****" in html(admin)
    with pytest.raises(UnreadableSecretError):
        settings.SECRET_KEY = "a third key"
        _ = hook.config
