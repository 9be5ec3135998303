"""What is handed from the training thread to the recorder, and what a run's end reports."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fp8scope.recording.records import Bytes, Kind


class Pending(Protocol):
    """Values that are on their way from a device."""

    def is_ready(self) -> bool:
        """Whether they have arrived."""

    def wait(self) -> None:
        """Wait until they have."""


class Entry(abc.ABC):
    """Something for the spool. Its bytes are made once `wait` has returned, by whoever writes them."""

    __slots__ = ()
    kind: Kind

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether `wait` would not wait."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait for the device that the bytes come from."""

    @abc.abstractmethod
    def pieces(self) -> Sequence[Bytes]:
        """What a record's payload consists of; nothing where there is nothing to record."""

    def done(self) -> None:  # noqa: B027 - most have nothing to do
        """It has been written, or given up: what its pieces lie in is free."""


class Document(Entry):
    """What `payload` makes; `source` is what it reads from a device."""

    __slots__ = ("kind", "payload", "source")

    def __init__(self, kind: Kind, payload: Callable[[], bytes], source: Pending | None = None) -> None:
        self.kind = kind
        self.payload = payload
        self.source = source

    def is_ready(self) -> bool:
        return self.source is None or self.source.is_ready()

    def wait(self) -> None:
        if self.source is not None:
            self.source.wait()

    def pieces(self) -> Sequence[Bytes]:
        payload = self.payload()
        return (payload,) if payload else ()


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The tensors from `offset` on, and the names of their statistics."""

    offset: int
    tensors: Sequence[Mapping[str, Any]]
    statistics: Sequence[str]

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a writer writes from: its rank and host, and which attempt at the run it belongs to."""

    rank: int = 0
    hostname: str = ""
    attempt: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "hostname": self.hostname, "attempt": self.attempt}


@dataclass(frozen=True)
class FinishReport:
    """How a run ended. `complete`: the server has acknowledged everything that was recorded."""

    complete: bool
    rows_sent: int = 0
    points_sent: int = 0
    rows_dropped: int = 0
    messages_refused: int = 0
    errors: int = 0
    directory: Path | None = None
    """Where what is left lies, for `fp8scope sync`; None when nothing is left."""

    def joined(self, earlier: "FinishReport") -> "FinishReport":
        """The report of both: this process's last writer, and an earlier one of it."""
        return replace(
            self,
            complete=self.complete and earlier.complete,
            rows_sent=self.rows_sent + earlier.rows_sent,
            points_sent=self.points_sent + earlier.points_sent,
            messages_refused=self.messages_refused + earlier.messages_refused,
            directory=self.directory or earlier.directory,
        )
