"""From the device to the host without waiting: one asynchronous copy at the end of a step.

Only this module and `fp8scope.watch` need torch; a program without it never imports it here.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from fp8scope_kernels import StatisticsBuffer, TensorInfo

MAX_IN_FLIGHT = 64
FIRST_CAPACITY = 256

EMPTY: NDArray[np.float64] = np.zeros((0, 0))


class BusyError(RuntimeError):
    """All host buffers wait for the device; the step's tensors cannot be taken along."""


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether `value` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def host_number(value: object) -> float:
    """A number that lives on the host, as a float. Raises TypeError or ValueError when it is none."""
    if is_tensor(value):
        detached = value.detach()
        # NumPy has no bfloat16. No `.item()`: that is the call which, on a device, waits.
        value = (detached.double() if detached.dtype.itemsize < 4 else detached).numpy()
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise ValueError(f"a scalar has one element, this has {value.size}: reduce it first (.mean())")
        return float(value.reshape(()) if value.ndim else value)
    if isinstance(value, str | bytes):
        raise TypeError(f"a scalar must be a number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


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
        return torch.empty(max(size, 1024), dtype=torch.float64, pin_memory=True)

    def give_back(self, buffer: "torch.Tensor") -> None:
        with self._lock:
            self._taken -= 1
            self._free.append(buffer)


@dataclass(slots=True)
class Snapshot:
    """A step's values on their way to the host: the statistics, then the scalars that were on a device."""

    statistics_shape: tuple[int, int]
    names: Sequence[str]
    host: "torch.Tensor | NDArray[np.float64]"
    event: "torch.cuda.Event | None" = None
    pool: HostBuffers | None = None

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the copy: not on the training thread."""
        if self.event is not None:
            self.event.synchronize()

    def read(self) -> tuple[NDArray[np.float64], dict[str, float]]:
        """After `wait`: statistics [tensors, statistics] and scalars."""
        if isinstance(self.host, np.ndarray):
            values = self.host
        else:
            count = self.statistics_shape[0] * self.statistics_shape[1] + len(self.names)
            values = self.host[:count].numpy().copy()
            if self.pool is not None:
                self.pool.give_back(self.host)
        split = len(values) - len(self.names)
        scalars = dict(zip(self.names, values[split:].tolist(), strict=True))
        return values[:split].reshape(self.statistics_shape), scalars


class Collector:
    """Owns the statistics buffer that watched models write to."""

    def __init__(self) -> None:
        self.buffer: StatisticsBuffer | None = None
        self.recipe: Mapping[str, Any] = {}
        self._announced = 0
        self._pool = HostBuffers()

    def watch(self, model: "torch.nn.Module") -> int:
        """Bind the model's linear layers to the buffer; returns how many tensors are observed now."""
        from fp8scope_kernels import Fp8Linear, StatisticsBuffer, observable_layers, observe

        layers = [layer for _, layer in observable_layers(model)]
        if not layers:
            return 0
        if self.buffer is None:
            self.buffer = StatisticsBuffer(max(FIRST_CAPACITY, 3 * len(layers)), layers[0].weight.device)
        if not self.recipe and isinstance(layers[0], Fp8Linear):
            self.recipe = layers[0].recipe.to_dict()
        return observe(model, self.buffer)

    def new_tensors(self) -> "tuple[int, Sequence[TensorInfo], Sequence[str]] | None":
        """The catalogue's growth since the last call: offset, entries, and the names of the statistics."""
        if self.buffer is None or len(self.buffer) == self._announced:
            return None
        from fp8scope_kernels import STATISTICS

        offset = self._announced
        entries = self.buffer.catalogue[offset:]
        self._announced = offset + len(entries)
        return offset, entries, STATISTICS

    @property
    def row_bytes(self) -> int:
        """About what one step takes in memory."""
        return 1024 if self.buffer is None else 1024 + self.buffer.data.nbytes

    def discard(self) -> None:
        """Forget what was counted since the last snapshot."""
        if self.buffer is not None:
            self.buffer.zero_()

    def after_fork(self) -> None:
        """In a forked child: announce the tensors anew, and use no memory that a copy may still write to."""
        self._announced = 0
        self._pool = HostBuffers()

    def snapshot(self, scalars: "Mapping[str, torch.Tensor]") -> Snapshot | None:
        """Start the copy of the statistics and of the scalars that are on a device, and zero the statistics.

        None when there is nothing to copy. Nothing here waits for the device.
        """
        buffer = self.buffer
        if buffer is None and not scalars:
            return None
        if not scalars and buffer is not None and buffer.device.type == "cpu":
            host = buffer.data.numpy().ravel().copy()
            buffer.zero_()
            return Snapshot((len(buffer), buffer.data.shape[1]), (), host)
        try:
            return self._copy_from_device(scalars)
        finally:
            if buffer is not None:
                buffer.zero_()

    def _copy_from_device(self, scalars: "Mapping[str, torch.Tensor]") -> Snapshot:
        import torch

        buffer = self.buffer
        device = (
            next(iter(scalars.values())).device
            if buffer is None or buffer.device.type == "cpu"
            else buffer.device
        )
        parts = [value.reshape(1).to(device, torch.float64, non_blocking=True) for value in scalars.values()]
        shape = (0, 0)
        if buffer is not None:
            shape = (len(buffer), buffer.data.shape[1])
            parts.insert(0, buffer.data.reshape(-1).to(device, non_blocking=True))
        together = torch.cat(parts)
        if device.type != "cuda":
            return Snapshot(shape, tuple(scalars), together.to("cpu"))
        host = self._pool.take(together.numel())
        host[: together.numel()].copy_(together, non_blocking=True)
        # The recorder sleeps on the event instead of spinning.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return Snapshot(shape, tuple(scalars), host, event, self._pool)
