"""Entries from the training thread to the recorder: documents, the catalogue of tensors, steps, histograms.

Entries are made on the training thread and only refer to a step's values. The recorder's thread makes bytes
of them once the device has sent those values.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fp8scope.guard import Guard
from fp8scope.observe.snapshot import NOTHING, PlainSnapshot, Snapshot
from fp8scope.recording.records import Bytes, ExponentHistograms, RecordKind, Row
from fp8scope.recording.urgency import Urgency
from fp8scope.step import Step

if TYPE_CHECKING:
    from fp8scope_kernels import TensorInfo


LOGGED_PREFIX = "logged/"
"""Begins the name of what a script gave to another tracker as a value that the agent measures itself."""
LOGGED_TOO = tuple(f"{LOGGED_PREFIX}{name}" for name in ("loss", "learning_rate", "grad_norm"))
"""Left out of a step where it is what the agent has measured."""


class Pending(Protocol):
    """Values on their way from a device."""

    def is_ready(self) -> bool:
        """Return whether they have arrived."""

    def wait(self) -> None:
        """Wait until they have arrived."""


class SpoolEntry(abc.ABC):
    """One record for the spool. The thread that writes it calls `wait`, then `pieces`, then `done`."""

    __slots__ = ()
    kind: RecordKind

    @property
    def is_urgent(self) -> bool:
        """Once `pieces` was called: whether the record should be sent at once."""
        return False

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait for the device that holds the values."""

    @abc.abstractmethod
    def pieces(self) -> Sequence[Bytes]:
        """The parts of the record's payload; empty if there is nothing to record."""

    def done(self) -> None:  # noqa: B027 - most have nothing to do
        """Called once the entry is written or dropped; its buffers may be reused."""


class Document(SpoolEntry):
    """A record whose payload `payload()` returns; `source` is what that reads from a device."""

    __slots__ = ("kind", "payload", "source")

    def __init__(self, kind: RecordKind, payload: Callable[[], bytes], source: Pending | None = None) -> None:
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
class Origin:
    """The place of a writer: its rank and host, and the attempt at the run that it belongs to."""

    rank: int = 0
    hostname: str = ""
    attempt: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "hostname": self.hostname, "attempt": self.attempt}


def catalogue_of(offset: int, tensors: "Sequence[TensorInfo]", statistics: Sequence[str]) -> Catalogue:
    """The tensors from `offset` on, described in the server's terms."""
    described = [
        {
            "name": tensor.name,
            "module": tensor.module,
            "role": tensor.role,
            "format": tensor.format,
            "shape": list(tensor.shape),
            "numel": tensor.numel,
        }
        for tensor in tensors
    ]
    return Catalogue(offset, described, statistics)


class StepRow(SpoolEntry):
    """A step's row: logged values, measured values that were not logged, and the tensors' statistics.

    `tokens`: the tokens of all steps up to the end of this one.
    """

    __slots__ = ("_guard", "_is_urgent", "_keep", "_snapshot", "_step", "_tokens", "_urgency")
    kind = RecordKind.ROW

    def __init__(
        self,
        step: Step,
        tokens: int,
        snapshot: Snapshot | PlainSnapshot | None,
        guard: Guard,
        keep: Callable[[Sequence[Bytes]], None] | None = None,
        urgency: Urgency | None = None,
    ) -> None:
        """`keep` is called with the pieces of the row by the thread that records it."""
        self._step = step
        self._tokens = tokens
        self._snapshot = snapshot
        self._guard = guard
        self._keep = keep
        self._urgency = urgency
        self._is_urgent = False

    @property
    def is_urgent(self) -> bool:
        return self._is_urgent

    def _source(self) -> Pending | None:
        # A copy from a device ends after the events that time the step.
        if self._snapshot is not None and self._snapshot.event is not None:
            return self._snapshot
        return self._step.reading

    def is_ready(self) -> bool:
        source = self._source()
        return source is None or source.is_ready()

    def wait(self) -> None:
        source = self._source()
        if source is not None:
            source.wait()

    def pieces(self) -> Sequence[Bytes]:
        step, seconds = self._step, self._step.seconds
        seen = self._snapshot.read() if self._snapshot is not None else NOTHING
        values = {}
        if step.tokens > 0:
            values["tokens"] = float(self._tokens)
        # The beginning of a light step is unknown.
        if step.began:
            values["step_seconds"] = seconds
            if step.tokens > 0:
                values["tokens_per_second"] = step.tokens / max(seconds, 1e-9)
        if step.reading is not None:
            values |= step.reading.read()
        values |= step.scalars
        values |= seen.scalars
        for name in LOGGED_TOO:
            if name in values and values[name] == values.get(name.removeprefix(LOGGED_PREFIX)):
                del values[name]
        if self._urgency is not None:
            self._is_urgent = self._urgency.is_urgent(values, seen.statistics)
        dropped = self._guard.counts()[0]
        pieces = Row(
            step=step.number,
            time_us=step.ended_at,
            dropped=dropped,
            scalars=values,
            statistics=seen.statistics,
            extras=seen.extras,
        ).pieces()
        if self._keep is not None:
            self._keep(pieces)
        return pieces

    def done(self) -> None:
        if self._snapshot is not None:
            self._snapshot.release()


def histograms_of(step: Step, snapshot: Snapshot | PlainSnapshot) -> Document:
    """The exponent histograms of a sampled step; no record if none were taken."""
    number, now = step.number, step.ended_at

    def payload() -> bytes:
        seen = snapshot.read()
        if not len(seen.histogram_tensors):
            return b""
        return ExponentHistograms(number, now, seen.histogram_tensors, seen.histogram_counts).encode()

    return Document(RecordKind.HISTOGRAM, payload, snapshot)
