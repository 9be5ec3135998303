"""What a step hands to the recorder: tensors seen for the first time, its row, its histograms.

They are made on the training's thread, and only refer to the step's values; the recorder's thread makes bytes
of them, once the device has sent what they refer to.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8scope.guard import Guard
from fp8scope.observe.snapshot import NOTHING, PlainSnapshot, Snapshot
from fp8scope.recording.entries import Catalogue, Document, Entry, Pending
from fp8scope.recording.records import Bytes, Histograms, Kind, Row
from fp8scope.step import Step

if TYPE_CHECKING:
    from fp8scope_kernels import TensorInfo


def catalogue_of(offset: int, tensors: "Sequence[TensorInfo]", statistics: Sequence[str]) -> Catalogue:
    """The tensors from `offset` on, described as the server wants it."""
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


class StepRow(Entry):
    """A step's row: what was logged, else measured; and what `snapshot` brings from the device.

    `tokens` were trained on up to its end, in all steps.
    """

    __slots__ = ("_guard", "_snapshot", "_step", "_tokens")
    kind = Kind.ROW

    def __init__(
        self, step: Step, tokens: int, snapshot: Snapshot | PlainSnapshot | None, guard: Guard
    ) -> None:
        self._step = step
        self._tokens = tokens
        self._snapshot = snapshot
        self._guard = guard

    def _source(self) -> Pending | None:
        # A copy from a device ends after the events by which the step was timed.
        if self._snapshot is not None and self._snapshot.event is not None:
            return self._snapshot
        return self._step._reading

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
        values = {"step_seconds": seconds}
        if step.tokens > 0:
            values["tokens"] = float(self._tokens)
            values["tokens_per_second"] = step.tokens / max(seconds, 1e-9)
        if step._reading is not None:
            values |= step._reading.read()
        values |= step._scalars
        values |= seen.scalars
        dropped = self._guard.counts()[0]
        return Row(step.number, step._ended_at, dropped, values, seen.statistics, seen.extras).pieces()

    def done(self) -> None:
        if self._snapshot is not None:
            self._snapshot.release()


def histograms_of(step: Step, snapshot: Snapshot | PlainSnapshot) -> Document:
    """How the exponents were distributed in a sampled step; no bytes where nothing was."""
    number, now = step.number, step._ended_at

    def payload() -> bytes:
        seen = snapshot.read()
        if not len(seen.histogram_tensors):
            return b""
        return Histograms(number, now, seen.histogram_tensors, seen.histogram_counts).encode()

    return Document(Kind.HISTOGRAM, payload, snapshot)
