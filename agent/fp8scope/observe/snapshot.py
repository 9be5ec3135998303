"""The values of a step: copied from the devices to the host, and assembled into one matrix.

The training thread starts the copies and the recorder's thread reads them, so no step waits for a device.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from fp8scope.observe.tensors import StatisticsTable
    from fp8scope_kernels.devices import Event

MAX_IN_FLIGHT = 64

Float64s = NDArray[np.float64]

EMPTY: Float64s = np.zeros((0, 0))


class BusyError(RuntimeError):
    """All host buffers are in use: the tensors of this step cannot be recorded."""


class HostBuffers:
    """A pool of pinned host memory. The training thread takes buffers, the recorder gives them back."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> "torch.Tensor":
        """Return a float64 buffer of at least `size`. Raises BusyError if MAX_IN_FLIGHT are in use."""
        import torch

        with self._lock:
            if self._taken >= MAX_IN_FLIGHT:
                raise BusyError(f"{MAX_IN_FLIGHT} steps wait for the device")
            self._taken += 1
            while self._free:
                buffer = self._free.pop()
                if buffer.numel() >= size:
                    return buffer
        # A tensor made in inference mode could not be written to later, and a step may end in that mode.
        with torch.inference_mode(False):
            return torch.empty(max(size, 1024), dtype=torch.float64, device="cpu", pin_memory=True)

    def give_back(self, buffer: "torch.Tensor") -> None:
        """Return a buffer to the pool."""
        with self._lock:
            self._taken -= 1
            self._free.append(buffer)


class Observed(NamedTuple):
    """The values of a step on the host, in the form of `records.Row` and `records.Histograms`."""

    statistics: NDArray[np.float64]
    extras: Mapping[str, NDArray[np.float64]]
    scalars: Mapping[str, float]
    histogram_tensors: NDArray[np.int32]
    histogram_counts: NDArray[np.float64]


NO_TENSORS: NDArray[np.int32] = np.zeros(0, np.int32)
NOTHING = Observed(EMPTY, {}, {}, NO_TENSORS, EMPTY)


class Assembly:
    """Assembles the tables of one step into one matrix in the order of the catalogue."""

    def __init__(self, sampled: bool) -> None:
        # Needs torch, which a program that watches nothing does not import.
        from fp8scope.observe.tensors.buffers import SAMPLED_STATISTICS, WIDTHS

        self._widths = WIDTHS
        self._sampled_statistics = SAMPLED_STATISTICS
        self._sampled = sampled
        self._tables: list[tuple[NDArray[np.int64], list[Float64s]]] = []
        self._in_order = True

    def add(self, table: "StatisticsTable", rows: int, values: Float64s) -> int:
        """Add the first `rows` rows of a table, taken from the front of `values`; returns their size."""
        parts, at = [], 0
        for width in self._widths if self._sampled else self._widths[:1]:
            parts.append(values[at : at + rows * width].reshape(rows, width))
            at += rows * width
        self._tables.append((table.places(rows), parts))
        self._in_order = self._in_order and table.is_in_order(rows)
        return at

    def finish(self, scalars: Mapping[str, float]) -> Observed:
        """Return everything that was added, by positions in the catalogue."""
        if not self._sampled and len(self._tables) == 1 and self._in_order:
            # The usual case: one device, an unsampled step, and rows in the order of the catalogue.
            _, (statistics,) = self._tables[0]
            return Observed(statistics, {}, scalars, NO_TENSORS, EMPTY)
        tensors = max(
            (int(positions.max()) + 1 for positions, _ in self._tables if len(positions)), default=0
        )
        statistics = np.zeros((tensors, self._widths[0]))
        extras = np.full((len(self._sampled_statistics), tensors), np.nan)
        histograms: list[tuple[NDArray[np.int64], Float64s]] = []
        for positions, parts in self._tables:
            # Two tables may have the same name, for two models: take the one that was observed.
            seen = parts[0][:, 0] > 0
            statistics[positions[seen]] = parts[0][seen]
            if self._sampled:
                extras[:, positions[seen]] = _extras(*parts[1:])[:, seen]
                counts = parts[2][:, 2:]
                sampled = counts.any(axis=1)
                histograms.append((positions[sampled], counts[sampled]))
        named = {
            name: values
            for name, values in zip(self._sampled_statistics, extras, strict=True)
            if not np.isnan(values).all()
        }
        if not histograms:
            return Observed(statistics, named, scalars, NO_TENSORS, EMPTY)
        tensor_indexes = np.concatenate([positions for positions, _ in histograms]).astype(np.int32)
        counts = np.concatenate([counts for _, counts in histograms])
        return Observed(statistics, named, scalars, tensor_indexes, counts)


def _extras(blocks: Float64s, samples: Float64s, notes: Float64s) -> Float64s:
    """Return float64 [SAMPLED_STATISTICS, rows], NaN where a row has no value."""
    blocks = np.where(blocks[:, :1] > 0, blocks, np.nan)
    # A tensor that was not cast has a histogram and no errors.
    errors = np.where(samples[:, 1:2] > 0, samples[:, :2], np.nan)
    return np.concatenate((blocks, errors, notes), axis=1).T


@dataclass(slots=True, kw_only=True)
class Copied:
    """The copy from one device: the values of its tables, followed by the scalars that were on it."""

    tables: "Sequence[tuple[StatisticsTable, int]]"
    names: Sequence[str]
    host: "torch.Tensor | NDArray[np.float64]"
    size: int
    event: "Event | None" = None
    give_back: "Callable[[torch.Tensor], None] | None" = None
    """Returns `host` to its pool after it was read."""

    def read(self) -> NDArray[np.float64]:
        """Return float64 [size]; call it after the event."""
        if isinstance(self.host, np.ndarray):
            return self.host
        values: NDArray[np.float64] = self.host.view(-1)[: self.size].numpy().copy()
        if self.give_back is not None:
            self.give_back(self.host)
        return values


class PlainSnapshot:
    """The values of a step on the CPU only: the memory that the layers wrote to, taken without a copy."""

    __slots__ = ("_table", "_rows", "_storage")
    sampled = False
    event = None

    def __init__(self, table: "StatisticsTable") -> None:
        self._table = table
        self._rows = len(table.positions)
        self._storage = table.buffer.exchange()

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for: there is no device."""

    def read(self) -> Observed:
        """Return the values; valid until `release`."""
        values: NDArray[np.float64] = self._storage.numpy()[: self._rows]
        if self._table.is_in_order(self._rows):
            return Observed(values, {}, {}, NO_TENSORS, EMPTY)
        assembly = Assembly(sampled=False)
        assembly.add(self._table, self._rows, values.ravel())
        return assembly.finish({})

    def release(self) -> None:
        """Return the memory to the table for a later step."""
        self._table.buffer.recycle(self._storage)


@dataclass(slots=True)
class Snapshot:
    """The values of a step that are being copied to the host."""

    copies: Sequence[Copied]
    sampled: bool = False
    _observed: Observed | None = field(default=None, init=False)

    @property
    def event(self) -> "Event | None":
        """The event that marks the end of a copy; None if no device is involved."""
        return next((copied.event for copied in self.copies if copied.event is not None), None)

    def is_ready(self) -> bool:
        """Return whether all copies have arrived."""
        events = [copied.event for copied in self.copies if copied.event is not None]
        return all(event.query() for event in events)

    def wait(self) -> None:
        """Wait for the copies; not for the training thread."""
        for copied in self.copies:
            if copied.event is not None:
                copied.event.synchronize()

    def read(self) -> Observed:
        """Return the values; call it after `wait`. Later calls return the same object."""
        if self._observed is None:
            self._observed = self._read()
            self.copies = ()
        return self._observed

    def _read(self) -> Observed:
        scalars: dict[str, float] = {}
        assembly = Assembly(self.sampled)
        for copied in self.copies:
            values, at = copied.read(), 0
            for table, rows in copied.tables:
                at += assembly.add(table, rows, values[at:])
            scalars |= zip(copied.names, values[at:].tolist(), strict=True)
        return assembly.finish(scalars)

    def release(self) -> None:
        """Nothing to release: `read` returned a copy."""
