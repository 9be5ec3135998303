"""Messages fit into what each service accepts, and keep their link."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from apprise import Apprise
from apprise.plugins import opsgenie
from apprise.plugins.discord import NotifyDiscord
from apprise.plugins.pagerduty import PAGERDUTY_API_LOOKUP
from apprise.plugins.telegram import NotifyTelegram
from apprise.plugins.vonage import NotifyVonage
from dashboard.helpers.messages import MESSAGE, NOTICE, Receiver
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.alerts.channels import ChannelMessage, service, wording

LINK = "https://fp8.example.org/p/default/alerts/"
ALERTS = 100
TENSORS = [
    {"name": f"model.layers.{i}.mlp.experts.{i}.down_proj.input", "after_step": 110} for i in range(10)
]
LONG = replace(
    NOTICE,
    label="Growing attention logits",
    message="14 tensors in layers 20-24 overflow, first blocks.21.mlp.down.input at step 118. " * 5,
    tensors=TENSORS,
    tensors_over=57,
    url=f"{LINK}7/",
)
DIGEST = replace(
    MESSAGE,
    url=LINK,
    notices=tuple(
        replace(LONG, event=i, run=f"run {i % 7}", opened_at=NOTICE.opened_at + timedelta(seconds=i))
        for i in range(ALERTS)
    ),
)
SINGLE = replace(MESSAGE, url=LINK, notices=(LONG,))


def discord(receiver: Receiver, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(NotifyDiscord, "notify_url", receiver.url)
    return "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js"


def pagerduty(receiver: Receiver, patch: pytest.MonkeyPatch) -> str:
    receiver.status = 202
    for region in PAGERDUTY_API_LOOKUP:
        patch.setitem(PAGERDUTY_API_LOOKUP, region, receiver.url)
    return "pagerduty://ABCDEFGHIJKLMNOPQRSTUVWXYZ012345@abcdefghijklmnopqrstuvwxyz012345"


def opsgenie_url(receiver: Receiver, patch: pytest.MonkeyPatch) -> str:
    receiver.status, receiver.body = 202, b'{"requestId": "one"}'
    for region in opsgenie.OPSGENIE_API_LOOKUP:
        patch.setitem(opsgenie.OPSGENIE_API_LOOKUP, region, receiver.url)
    return "opsgenie://0123456789abcdef0123456789abcdef0123"


def telegram(receiver: Receiver, patch: pytest.MonkeyPatch) -> str:
    receiver.body = b'{"ok": true, "result": []}'
    patch.setattr(NotifyTelegram, "notify_url", f"{receiver.url}/")
    return "tgram://123456789:abcdefg_hijklmnop/12315544/"


def sms(receiver: Receiver, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(NotifyVonage, "notify_url", receiver.url)
    return "vonage://abcdefgh:abcdefghijklmnop@15551234567/15551234568"


def mattermost(receiver: Receiver, patch: pytest.MonkeyPatch) -> str:
    return receiver.url.replace("http://", "mmost://").replace("/hook", "/aaaaaaaaaaaaaaaaaaaaaaaa")


def as_json(body: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(body)
    return content


# What the service's documentation limits, and to how many characters.
SERVICES: dict[str, tuple[Callable[[Receiver, pytest.MonkeyPatch], str], Callable[[bytes], str], int]] = {
    "discord": (discord, lambda body: as_json(body)["content"], 2_000),
    "pagerduty": (pagerduty, lambda body: as_json(body)["payload"]["summary"], 1_024),
    "opsgenie": (opsgenie_url, lambda body: as_json(body)["description"], 15_000),
    "telegram": (telegram, lambda body: as_json(body)["text"], 4_096),
    "mattermost": (mattermost, lambda body: as_json(body)["text"], 4_000),
}


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("message", [DIGEST, SINGLE], ids=["digest", "one alert"])
def test_a_long_message_is_cut_where_the_service_would(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, name: str, message: ChannelMessage
) -> None:
    address, content, limit = SERVICES[name]
    service.send({"url": address(receiver, monkeypatch)}, message)
    (request,) = receiver.requests
    text = content(request[2])
    assert len(text) <= limit
    assert LINK in text
    if message is DIGEST:
        shown = text.count("* Growing attention logits")
        assert shown and f"... and {ALERTS - shown} more" in text


def test_a_text_message_has_its_words_and_if_possible_its_link(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.body = b'{"message-count": "1"}'
    service.send({"url": sms(receiver, monkeypatch)}, SINGLE)
    plugin = Apprise.instantiate(sms(receiver, monkeypatch))
    assert plugin is not None and plugin.body_maxlen == 160
    title, body = service.fitting(plugin, SINGLE)
    assert len(title) + len(body) <= 160 and title.startswith("Growing attention logits in gpt")
    assert SINGLE.notices[0].url in body and len(receiver.requests) == 1


def test_a_user_may_prefer_several_messages(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    service.send({"url": f"{discord(receiver, monkeypatch)}?overflow=split"}, DIGEST)
    texts = [as_json(body)["content"] for _, _, body in receiver.requests]
    assert len(texts) > 1 and all(len(text) <= 2_000 for text in texts)


MESSAGES = {"digest": DIGEST, "single": SINGLE, "test": replace(MESSAGE, url=LINK, notices=())}


@given(st.integers(0, 3_000), st.sampled_from(sorted(MESSAGES)))
def test_any_limit_is_kept(longest: int, name: str) -> None:
    message = MESSAGES[name]
    text = wording.text(message, longest)
    assert len(text) <= longest
    url = message.notices[0].url if len(message.notices) == 1 else message.url
    assert url in text or longest < len(url) + wording.MIN_TITLE + 2
    assert len(wording.title(message, longest)) <= longest
