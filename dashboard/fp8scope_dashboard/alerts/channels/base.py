"""What every channel gets, and how it says that it could not deliver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any


class DeliveryError(Exception):
    """A delivery failed. The text is shown to people: it must not hold a secret.

    `permanent`: trying again cannot help.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True)
class Notice:
    """An event on its way. `delivery` is the same in every attempt: receivers may use it to drop doubles."""

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
        """JSON types only."""
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
