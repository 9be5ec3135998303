"""The content of deliveries, and the error that channels raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from fp8scope_dashboard.text.numbers import json_number


class DeliveryError(Exception):
    """A delivery failed. The message is shown on pages and must not contain a secret.

    `permanent`: another attempt cannot succeed. `retry_after`: seconds that the receiver asks to wait.
    """

    def __init__(self, message: str, *, permanent: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One reason to tell about one alert.

    Attributes:
        delivery, key: the same in every attempt, so that receivers can drop duplicates.
        alert: the same in all notices of one alert to one channel, so that receivers can join them.
        reason: opened, reopened, worse, escalated or resolved.
        message: one sentence with the numbers.
        after_step: the last step before the onset at which the first tensor was observed; None if that is
            not known.
        url: the alert's page, where it can be acknowledged. run_url: the run's page.
        tensors: the worst ones; `tensors_over` counts all.
        note: why the notice is sent, if it is not the first.
        cause: what the diagnosis of the run suspects by now; empty if nothing.
        also: other rules that found the same. commands: what the training was asked to do.
    """

    delivery: int
    key: str
    alert: str
    reason: str
    event: int
    kind: str
    label: str
    severity: str
    state: str
    message: str
    onset_step: int
    step: int
    value: float | None
    threshold: float | None
    opened_at: datetime
    project: str
    run: str
    run_name: str
    url: str
    tensors: list[dict[str, Any]] = field(default_factory=list)
    tensors_over: int = 0
    after_step: int | None = None
    run_url: str = ""
    note: str = ""
    cause: str = ""
    also: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types. Numbers that JSON does not have are the strings of docs/wire.md."""
        fields = {**asdict(self), "opened_at": self.opened_at.isoformat()}
        return {name: _as_json(value) for name, value in fields.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class ChannelMessage:
    """The content of one attempt: a notice, several as a digest, or none as a test of the channel.

    Attributes:
        key: the idempotency key, the same in every attempt.
        url: the page to open.
        draw_chart: returns a PNG of the evidence, or None; called only by channels that can show pictures.
        chart_url: the chart's public address, for chats that accept no picture; empty without one.
    """

    key: str
    project: str
    url: str
    notices: tuple[Notice, ...] = ()
    draw_chart: Callable[[], bytes | None] = lambda: None
    chart_url: str = ""


Send = Callable[[Mapping[str, Any], ChannelMessage], None]


@dataclass(frozen=True)
class ChannelType:
    """The functions of one kind of channel.

    Attributes:
        label: its name on pages.
        send: takes a channel's config and a message; raises DeliveryError unless the receiver accepted it.
        masked: takes a channel's config; returns the receiver's address without its secrets.
    """

    label: str
    send: Send
    masked: Callable[[Mapping[str, Any]], str]
