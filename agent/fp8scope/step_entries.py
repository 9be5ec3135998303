"""What a step hands to the recorder: tensors seen for the first time, its row, its histograms.

They are made on the training's thread, and only refer to the step's values; the recorder's thread makes bytes
of them, once the device has sent what they refer to.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8scope.entries import Catalogue, Entry
from fp8scope.guard import Guard
from fp8scope.records import Histograms, Kind, Row
from fp8scope.snapshot import NOTHING, Snapshot
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


def row_of(step: Step, snapshot: Snapshot | None, guard: Guard) -> Entry:
    """The step's row: what was logged, else measured; and what `snapshot` brings from the device."""
    number, now, scalars, reading = step.number, step._ended_at, step._scalars, step._reading

    def payload() -> bytes:
        seen = snapshot.read() if snapshot is not None else NOTHING
        measured = reading.read() if reading is not None else {}
        values = {**measured, **scalars, **seen.scalars}
        return Row(number, now, guard.counts()[0], values, seen.statistics, seen.extras).encode()

    # A copy from a device ends after the events by which the step was timed.
    source = snapshot if snapshot is not None and snapshot.event is not None else reading
    return Entry(Kind.ROW, payload, source)


def histograms_of(step: Step, snapshot: Snapshot) -> Entry:
    """How the exponents were distributed in a sampled step; no bytes where nothing was."""
    number, now = step.number, step._ended_at

    def payload() -> bytes:
        seen = snapshot.read()
        if not len(seen.histogram_tensors):
            return b""
        return Histograms(number, now, seen.histogram_tensors, seen.histogram_counts).encode()

    return Entry(Kind.HISTOGRAM, payload, snapshot)
