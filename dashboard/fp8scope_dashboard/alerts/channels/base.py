"""The notice that channels deliver, and the error that they raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any


class DeliveryError(Exception):
    """A delivery failed. The message is shown on pages and must not contain a secret.

    `permanent`: another attempt cannot succeed.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True)
class Notice:
    """An event to deliver. `delivery` is the same in every attempt, so that receivers can drop duplicates."""

    delivery: int
    event: int
    kind: str
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

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {**asdict(self), "opened_at": self.opened_at.isoformat()}


Send = Callable[[Mapping[str, Any], Notice], None]


@dataclass(frozen=True)
class ChannelType:
    """The functions of one kind of channel.

    Attributes:
        send: takes a channel's config and a notice; raises DeliveryError unless the receiver accepted it.
        masked: takes a channel's config; returns the receiver's address without its secrets.
    """

    send: Send
    masked: Callable[[Mapping[str, Any]], str]
