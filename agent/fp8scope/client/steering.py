"""Notes at steps, and commands to training processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fp8scope.client.fields import read_object, time_of


@dataclass(frozen=True, kw_only=True)
class StoredStepNote:
    """A note at a step. `written_by` is a person; empty for one who has gone."""

    step: int
    text: str
    written_by: str
    written_at: datetime | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "StoredStepNote":
        """A note of an answer."""
        return read_object(cls, answer, written_at=time_of(answer["written_at"]))


@dataclass(frozen=True, kw_only=True)
class GivenCommand:
    """A command, and what became of it.

    Attributes:
        state: waiting, delivered, expired, accepted, done, refused or failed: the worst of all processes.
        message, step: of the latest result of a process.
    """

    id: int
    kind: str
    arguments: Mapping[str, Any]
    reason: str
    given_by: str
    given_at: datetime | None
    state: str
    message: str
    step: int | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "GivenCommand":
        """A command of an answer."""
        return read_object(cls, answer, given_at=time_of(answer["given_at"]))
