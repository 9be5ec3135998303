"""The batches of the last steps: where they are in the data, their hashes, and copies of them if allowed.

The batches that a script draws between two completed steps are a group. Groups are numbered from 1 in each
process, so that the same script run again has the same groups, whatever numbers its steps have.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.optim import Optimizer

from fp8scope.control.training_state import clone_batch
from fp8scope.incidents.rates import MAX_CALLS, LearningRates, rates_of
from fp8scope.incidents.snapshots import random_state
from fp8scope.observe.batch_hash import data_hash
from fp8scope.scalars import is_tensor

MAX_GROUPS = 256
MAX_HASHES = 64
"""Hashes kept of one group."""


@dataclass(slots=True)
class KeptBatch:
    """A copy of a batch, and the random state right after it was drawn."""

    batch: Any
    random: dict[str, Any]
    nbytes: int

    @classmethod
    def of(cls, batch: Any) -> "KeptBatch":
        copied = clone_batch(batch)
        return cls(copied, random_state(), bytes_of(copied))


@dataclass(slots=True, kw_only=True)
class StepBatches:
    """The batches drawn after step `after_step`; the first is number `position` of the process, from 0.

    `hashes` are None for batches on a device, which would have to be waited for. `stored` is None if the
    batches are not kept in full.
    """

    ordinal: int
    after_step: int
    position: int
    count: int = 0
    hashes: list[int | None] = field(default_factory=list)
    rates: list[LearningRates] = field(default_factory=list)
    """One entry for each step of an optimizer, in their order."""
    stored: list[KeptBatch] | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "ordinal": self.ordinal,
            "after_step": self.after_step,
            "position": self.position,
            "count": self.count,
            "rates": self.rates,
            "hashes": [
                data_hash(self.stored[index].batch) if self.stored is not None and value is None else value
                for index, value in enumerate(self.hashes)
            ],
        }


class BatchLog:
    """Groups of the batches that the training thread draws. Other threads may read `groups`."""

    def __init__(self, max_bytes: int) -> None:
        self.groups: deque[StepBatches] = deque(maxlen=MAX_GROUPS)
        self.drawn = 0
        """Batches drawn in this process."""
        self.ordinal = 0
        self.keeps = False
        """Whether copies of the batches are kept."""
        self.overflowed = False
        """Whether batches were not kept because they exceed `max_bytes`."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._open: StepBatches | None = None

    def begins_group(self, completed: int) -> bool:
        """Return whether the next batch is the first after step `completed`."""
        return self._open is None or completed != self._open.after_step

    def begin_group(self, completed: int) -> None:
        """The batches that follow are drawn after step `completed`."""
        self.ordinal += 1
        batches: list[KeptBatch] | None = [] if self.keeps else None
        self._open = StepBatches(
            ordinal=self.ordinal, after_step=completed, position=self.drawn, stored=batches
        )
        if len(self.groups) == MAX_GROUPS:
            self._bytes -= _size(self.groups[0])
        self.groups.append(self._open)

    def add(self, batch: Any) -> None:
        """A batch was drawn."""
        group = self._open
        assert group is not None
        self.drawn += 1
        group.count += 1
        if group.stored is not None and self._bytes <= self._max_bytes:
            stored = KeptBatch.of(batch)
            group.stored.append(stored)
            self._bytes += stored.nbytes
        elif group.stored is not None:
            self._bytes -= _size(group)
            group.stored = None
            self.overflowed = True
        if len(group.hashes) < MAX_HASHES:
            # Copies are hashed when an incident is written.
            group.hashes.append(None if group.stored is not None else host_hash(batch))

    def note_rates(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if self._open is not None and len(self._open.rates) < MAX_CALLS:
            self._open.rates.append(rates_of(optimizer))

    def reaches_back_to(self, ordinal: int) -> bool:
        """Return whether the batches of this group and of all later ones are kept."""
        return not self.overflowed and bool(self.groups) and self.groups[0].ordinal <= ordinal

    def forget_before(self, ordinal: int) -> None:
        """Drop the copies of the batches of groups before this one."""
        for group in self.groups:
            if group.ordinal >= ordinal:
                break
            self._bytes -= _size(group)
            group.stored = None
        self.overflowed = False


class Driver(Protocol):
    """Hands out the batches of a script that is run again; see `fp8scope.replay`."""

    keeps_incidents: bool
    """True if an incident of the run is kept."""

    def serve(self, flight: Any, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches that the script trains on instead of those of `source`."""

    def step_ended(self, flight: Any, number: int) -> None:
        """Step `number` has ended, and its row was handed over."""


driver: Driver | None = None
"""Set while `fp8scope replay` runs a script."""


def host_hash(batch: Any) -> int | None:
    """`data_hash` of a batch on the host; None if a part of it is on a device."""
    return None if any(tensor.device.type != "cpu" for tensor in _tensors(batch, 0)) else data_hash(batch)


def bytes_of(batch: Any) -> int:
    """The size of the tensors and arrays in a batch."""
    return sum(int(getattr(leaf, "nbytes", 0)) for leaf in _leaves(batch, 0))


def _size(group: StepBatches) -> int:
    return sum(stored.nbytes for stored in group.stored or ())


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    return filter(is_tensor, _leaves(value, depth))


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple) and depth < 8:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item, depth + 1)
    else:
        yield value
