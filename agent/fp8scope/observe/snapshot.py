"""A step's values on their way from the device to the host, and in the recorder's hands."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from fp8scope.observe.tensors import Board

MAX_IN_FLIGHT = 64

EMPTY: NDArray[np.float64] = np.zeros((0, 0))


class BusyError(RuntimeError):
    """All host buffers wait for the device; the step's tensors cannot be taken along."""


class HostBuffers:
    """Pinned host memory, used again and again. Taken by the training thread, given back by the recorder."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> "torch.Tensor":
        """Float64 [at least size]. Raises BusyError when MAX_IN_FLIGHT are out."""
        import torch

        with self._lock:
            if self._taken >= MAX_IN_FLIGHT:
                raise BusyError(f"{MAX_IN_FLIGHT} steps wait for the device")
            self._taken += 1
            while self._free:
                buffer = self._free.pop()
                if buffer.numel() >= size:
                    return buffer
        # A step may end in inference mode, and what is made there could not be written to after it.
        with torch.inference_mode(False):
            return torch.empty(max(size, 1024), dtype=torch.float64, pin_memory=True)

    def give_back(self, buffer: "torch.Tensor") -> None:
        with self._lock:
            self._taken -= 1
            self._free.append(buffer)


class Observed(NamedTuple):
    """A step's values on the host, as `records.Row` and `records.Histograms` take them."""

    statistics: NDArray[np.float64]
    extras: Mapping[str, NDArray[np.float64]]
    scalars: Mapping[str, float]
    histogram_tensors: NDArray[np.int32]
    histogram_counts: NDArray[np.float64]


NO_TENSORS: NDArray[np.int32] = np.zeros(0, np.int32)
NOTHING = Observed(EMPTY, {}, {}, NO_TENSORS, EMPTY)


@dataclass(slots=True)
class Copied:
    """What one device sent: its boards' values one after the other, then the scalars that were on it."""

    boards: "Sequence[tuple[Board, int]]"
    names: Sequence[str]
    host: "torch.Tensor | NDArray[np.float64]"
    size: int
    event: "torch.cuda.Event | None" = None
    give_back: "Callable[[torch.Tensor], None] | None" = None
    """Takes `host` again, once it was read."""

    def read(self) -> NDArray[np.float64]:
        """After the event: float64 [size]."""
        if isinstance(self.host, np.ndarray):
            return self.host
        values: NDArray[np.float64] = self.host.view(-1)[: self.size].numpy().copy()
        if self.give_back is not None:
            self.give_back(self.host)
        return values


class PlainSnapshot:
    """A step's values where no device is: the memory that the layers wrote to, taken away without a copy."""

    __slots__ = ("_board", "_rows", "_storage")
    sampled = False
    event = None

    def __init__(self, board: "Board") -> None:
        self._board = board
        self._rows = len(board.positions)
        self._storage = board.buffer.exchange()

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        """There is no device."""

    def read(self) -> Observed:
        """Good until `release`."""
        values: NDArray[np.float64] = self._storage.numpy()[: self._rows]
        if self._board.is_in_order(self._rows):
            return Observed(values, {}, {}, NO_TENSORS, EMPTY)
        from fp8scope.observe.assembly import Assembly

        assembly = Assembly(sampled=False)
        assembly.add(self._board, self._rows, values.ravel())
        return assembly.finish({})

    def release(self) -> None:
        """Its memory is for a later step."""
        self._board.buffer.recycle(self._storage)


@dataclass(slots=True)
class Snapshot:
    """A step's values on their way to the host."""

    copies: Sequence[Copied]
    sampled: bool = False
    _observed: Observed | None = field(default=None, init=False)

    @property
    def event(self) -> "torch.cuda.Event | None":
        """What tells that the values have arrived; None where they have from the beginning."""
        return next((copied.event for copied in self.copies if copied.event is not None), None)

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        events = [copied.event for copied in self.copies if copied.event is not None]
        return all(bool(event.query()) for event in events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the copies: not on the training thread."""
        for copied in self.copies:
            if copied.event is not None:
                copied.event.synchronize()

    def read(self) -> Observed:
        """After `wait`; the same each time."""
        if self._observed is None:
            self._observed = self._read()
            self.copies = ()
        return self._observed

    def _read(self) -> Observed:
        from fp8scope.observe.assembly import Assembly

        scalars: dict[str, float] = {}
        assembly = Assembly(self.sampled)
        for copied in self.copies:
            values, at = copied.read(), 0
            for board, rows in copied.boards:
                at += assembly.add(board, rows, values[at:])
            scalars |= zip(copied.names, values[at:].tolist(), strict=True)
        return assembly.finish(scalars)

    def release(self) -> None:
        """What was read is a copy."""
