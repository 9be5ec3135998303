"""Counts the tensors of layers in high precision: their amax and non-finite elements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from fp8scope_kernels import backends, devices
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.graph_objects import GraphObject, fake_of, look_up, operator, register
from fp8scope_kernels.hooks import register_tensor_hook
from fp8scope_kernels.plain_tensors import PLAIN_TYPES, has_plain_memory, is_dtensor
from fp8scope_kernels.quantization import measure
from fp8scope_kernels.recipes import Role
from fp8scope_kernels.reference import Extent
from fp8scope_kernels.statistics import ROW_BYTES, STATISTICS, Pace, Slot
from fp8scope_kernels.torch_internals import break_graph, current_graph_task_id, is_exporting, is_traced
from fp8scope_kernels.triton import backend as triton_backend

SCALE, NONFINITE = STATISTICS.index("scale"), STATISTICS.index("nonfinite")
NOT_SEEN = (-1, 0, 0, 0)

OnError = Callable[[Exception], None]


class HighPrecisionObserver(GraphObject):
    """A forward hook that writes a high-precision layer's tensors to the statistics buffer.

    `on_error` is called with exceptions of the hook; without it, they propagate to the forward call.
    Subclasses override `write` to add other statistics.
    """

    on_error: OnError | None = None
    every_step = False
    """True if tensors are read in every step, including those that the buffer's `Pace` skips."""

    is_in_graph = False
    """True once a compiled graph has called it: the hook must then stay where the graph looks for it."""

    def __init__(self) -> None:
        self.slots: dict[Role, Slot] = {}
        register(self)
        self._weight_seen = NOT_SEEN
        # Only the three statistics of a plain tensor are needed, which one call of the kernels counts.
        self._is_simple = type(self).write is HighPrecisionObserver.write

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        """Count, and return the output only where a graph is recorded: it then passes through an operator."""
        if is_exporting() or not layer.training:
            return None
        if is_traced():
            return self._observe_in_graph(layer, inputs, output)
        self._observe(layer, inputs, output)
        return None

    # A graph breaks here where a tensor is of a kind that operators do not take.
    @break_graph
    def _observe(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.read(inputs[0] if inputs else None, getattr(layer, "weight", None), output)

    def read(self, x: Any, weight: Any, output: Any) -> None:
        """Count the factors of a product, and in the backward pass the gradient of its output.

        Nothing is counted in steps in which tensors are not read.
        """
        pace = self._active_pace("input")
        if pace is None:
            return
        began = perf_counter()
        self.count_forward(x, weight)
        # Registered in both calls, because the gradient flows through the output of only one of them.
        if isinstance(output, Tensor) and output.requires_grad:
            register_tensor_hook(output, self.count_gradient)
        pace.seconds += perf_counter() - began
        pace.calls += 1

    def _observe_in_graph(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        # Each rank counts its part of a sharded tensor.
        x, weight = _local(inputs[0] if inputs else None), _local(getattr(layer, "weight", None))
        tensors = (x, _local(output)) if weight is None else (x, weight, _local(output))
        if not all(type(tensor) in PLAIN_TYPES for tensor in tensors):
            self._observe(layer, inputs, output)
            return None
        weight = None if weight is None else weight.detach()
        torch.ops.fp8scope.observe(x.detach(), weight, self.number, self.turn)
        if not output.requires_grad:
            return None
        watched: Tensor = _WatchedOutput.apply(output, self.number, self.turn_back)  # type: ignore[no-untyped-call]
        return watched

    @property
    def is_reading(self) -> bool:
        """Return whether tensors are read in this step."""
        return self._active_pace("input") is not None

    def _active_pace(self, role: Role) -> Pace | None:
        """The pace of the row of this tensor; None where there is none, or nothing is read in this step."""
        slot = self.slots.get(role)
        if slot is None or not (slot.buffer.pace.observing or self.every_step):
            return None
        return slot.buffer.pace

    def count_forward(self, x: Any, weight: Any) -> None:
        """Count the input and the weight of a call, unless activation checkpointing recomputes it."""
        # A forward call inside a backward pass recomputes.
        if current_graph_task_id() == -1:
            self._count("input", x)
            self._count("weight", weight)

    def count_in_graph(self, *tensors: Tensor | None) -> None:
        """Count in a graph: operators call this with input and weight, or with the output's gradient."""
        self.is_in_graph = True
        pace = self._active_pace("input" if len(tensors) == 2 else "grad_output")
        if pace is None:
            return
        if len(tensors) == 1:
            self.count_gradient(*tensors)
            return
        began = perf_counter()
        self.count_forward(*tensors)
        pace.seconds += perf_counter() - began
        pace.calls += 1

    @unserializable_hook  # type: ignore[untyped-decorator]
    def count_gradient(self, gradient: Tensor) -> None:
        """Count the gradient of a layer's output."""
        began = perf_counter()
        self._count("grad_output", gradient)
        slot = self.slots.get("grad_output")
        if slot is not None:
            pace = slot.buffer.pace
            pace.seconds += perf_counter() - began
            pace.calls += 1

    def _count(self, role: Role, x: Any) -> None:
        slot = self.slots.get(role)
        if slot is None or not isinstance(x, Tensor):
            return
        try:
            if self._is_simple and self._count_compiled(role, slot, x):
                return
            if not x.is_floating_point():
                return
            with torch.no_grad(), _timed(slot.buffer.pace, x):
                # Each rank counts its part of a sharded tensor; the parts add up.
                self.write(role, slot, _local(x).detach())
        except Exception as error:
            if self.on_error is None:
                raise
            self.on_error(error)

    def _count_compiled(self, role: Role, slot: Slot, x: Tensor) -> bool:
        """Do as `write` in one call of the compiled kernels. Returns False if they cannot read this tensor.

        A weight that was already read in this step and has not changed (gradient accumulation, tied layers)
        is counted again without reading it.
        """
        buffer = slot.buffer
        storage = buffer.storage
        if not (has_plain_memory(x) and backends.use_compiled(x) and storage.is_cpu):
            return False
        address = storage.data_ptr() + slot.index * ROW_BYTES
        if role != "weight" or x.is_inference():
            cpu_backend.observe(x, address)
            return True
        generation, where, version, nonfinite = self._weight_seen
        if generation == buffer.generation and where == x.data_ptr() and version == x._version:
            cpu_backend.count_again(x.numel(), nonfinite, address)
        else:
            nonfinite = cpu_backend.observe(x, address)
            self._weight_seen = buffer.generation, x.data_ptr(), x._version, nonfinite
        return True

    def write(self, role: Role, slot: Slot, x: Tensor) -> None:
        """Add the statistics of one call's tensor to its row."""
        add_tensor(slot, x)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is another model: its tensors must not count in this model's rows.
        return {"slots": {}, "_weight_seen": NOT_SEEN, "_is_simple": self._is_simple}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register(self)


class _WatchedOutput(torch.autograd.Function):
    """The output of a layer in a graph, unchanged: its backward pass counts the gradient."""

    @staticmethod
    def forward(output: Tensor, number: Tensor, turn_back: Tensor) -> Tensor:
        # Not a view, which later operations could not change in place. The compiler leaves the copy out.
        return output.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        torch.ops.fp8scope.observe_gradient(_local(grads[0]), *ctx.saved_tensors)
        return grads[0], None, None


@operator("observe", mutates_args=("turn",))
def observe_op(x: Tensor, weight: Tensor | None, number: Tensor, turn: Tensor) -> None:
    """Count input and weight of a call of the layer that the observer with this number watches."""
    turn.add_(1)
    observer: HighPrecisionObserver | None = look_up(number)
    if observer is not None:
        observer.count_in_graph(x, weight)


@operator("observe_gradient", mutates_args=("turn_back",))
def observe_gradient_op(gradient: Tensor, number: Tensor, turn_back: Tensor) -> None:
    """Count the gradient of the output of a layer, see `observe_op`."""
    turn_back.add_(1)
    observer: HighPrecisionObserver | None = look_up(number)
    if observer is not None:
        observer.count_in_graph(gradient)


@fake_of("observe")
def _(x: Tensor, weight: Tensor | None, number: Tensor, turn: Tensor) -> None:
    """It returns nothing."""


@fake_of("observe_gradient")
def _(gradient: Tensor, number: Tensor, turn_back: Tensor) -> None:
    """It returns nothing."""


def _local(x: Any) -> Any:
    """This rank's part of a sharded tensor; anything else as it is."""
    return x.to_local() if is_dtensor(x) else x


def add_tensor(slot: Slot, x: Tensor) -> None:
    """Add `numel`, `amax` and `nonfinite` of x, which is not quantised, to the slot's row; `scale` is 1.

    x has any floating dtype and shape.
    Takes one launch with Triton, one call with the compiled kernels, or else a few operations of torch.
    """
    row = slot.row
    if has_plain_memory(x) and x.device == row.device:
        if backends.use_compiled(x):
            cpu_backend.observe(x, row.data_ptr())
            return
        if backends.use_triton(x, "observe"):
            launched = backends.attempt_triton("observe", lambda: triton_backend.observe(x, row))
            if launched is not None:
                return
    add_extent(row, x.numel(), measure(x))
    row[SCALE].fill_(1.0)


@contextmanager
def _timed(pace: Pace, x: Tensor) -> Iterator[None]:
    """Record events around the device's work in this block, if the pace collects events."""
    device = x.device
    if pace.events is None or not devices.is_accelerator(device) or devices.is_capturing(device):
        yield
        return
    before, after = (devices.new_event(device, timing=True) for _ in range(2))
    if before is None or after is None:
        yield
        return
    devices.record(before, device)
    yield
    devices.record(after, device)
    pace.events.append((before, after))


def add_extent(row: Tensor, elements: int, extent: Extent) -> None:
    """Add `numel`, `amax` and `nonfinite` of a tensor to its row, float64 [len(STATISTICS)]."""
    numel, amax, _, nonfinite = row.tensor_split((1, 2, NONFINITE))
    numel += elements
    torch.maximum(amax, extent.amax, out=amax)
    nonfinite += extent.nonfinite
