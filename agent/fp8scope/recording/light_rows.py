"""The rows of light steps: of steps so short that only their loss is taken; see `fp8scope.observe.budget`.

The training thread only makes the object. The thread that records it makes the bytes, of several at a time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fp8scope.guard import Guard
from fp8scope.observe.snapshot import EMPTY
from fp8scope.recording.entries import SpoolEntry
from fp8scope.recording.records import Bytes, RecordKind, Row
from fp8scope.recording.urgency import Urgency


@dataclass(frozen=True, slots=True, kw_only=True)
class LightSource:
    """The common content of the rows of some light steps. `keep` is called with the pieces of each row."""

    names: Sequence[str]
    """The names under which the loss is recorded."""
    guard: Guard
    urgency: Urgency
    keep: Callable[[Sequence[Bytes]], None] | None
    clock_offset: float
    """Seconds from `time.perf_counter` to the time since 1970."""


def clock_offset() -> float:
    """Return the `LightSource.clock_offset` of now."""
    return time.time() - time.perf_counter()


class LightRow(SpoolEntry):
    """The row of one light step: its number, end (`time.perf_counter`) and loss, None if there was none.

    `step_tokens` are those of this step, `tokens` those of all steps up to its end, 0 if they are not known.
    """

    __slots__ = ("_is_urgent", "_source", "ended", "loss", "number", "step_tokens", "tokens")
    kind = RecordKind.ROW

    def __init__(
        self, source: LightSource, number: int, ended: float, loss: float | None, step_tokens: int
    ) -> None:
        self._source = source
        self.number = number
        self.ended = ended
        self.loss = loss
        self.step_tokens = step_tokens
        self.tokens = 0
        self._is_urgent = False

    @property
    def is_urgent(self) -> bool:
        return self._is_urgent

    @property
    def ended_at(self) -> int:
        """Return when the step ended, in microseconds since 1970."""
        return int((self.ended + self._source.clock_offset) * 1e6)

    def scalars(self) -> dict[str, float]:
        """Return the values under their names."""
        return {} if self.loss is None else dict.fromkeys(self._source.names, self.loss)

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for: the loss is on the host."""

    def pieces(self) -> Sequence[Bytes]:
        return (self.payload(),)

    def payload(self) -> bytes:
        """Return the payload of the ROW record, once."""
        source, values = self._source, self.scalars()
        if self.tokens:
            values["tokens"] = float(self.tokens)
        self._is_urgent = source.urgency.is_urgent(values, EMPTY)
        pieces = Row(
            step=self.number,
            time_us=self.ended_at,
            dropped=source.guard.counts()[0],
            scalars=values,
            statistics=EMPTY,
        ).pieces()
        payload = b"".join(pieces)
        if source.keep is not None:
            source.keep((payload,))
        return payload
