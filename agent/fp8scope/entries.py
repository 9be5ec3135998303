"""What is handed from the training thread to the recorder, and what a run's end reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fp8scope.records import Kind


class Pending(Protocol):
    """Values that are on their way from a device."""

    def is_ready(self) -> bool:
        """Whether they have arrived."""

    def wait(self) -> None:
        """Wait until they have."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something for the spool; `payload` makes its bytes once `wait` has returned."""

    kind: Kind
    payload: Callable[[], bytes]
    source: Pending | None = None
    """What `payload` reads from a device."""

    def is_ready(self) -> bool:
        return self.source is None or self.source.is_ready()

    def wait(self) -> None:
        if self.source is not None:
            self.source.wait()


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
