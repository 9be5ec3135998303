"""Attach telemetry to a model: to its FP8 layers, and to those that could be FP8 and are not.

A layer that stays in high precision is observed by hooks: how large its three tensors are and whether they
are finite, under the names that they have in the FP8 run, so that the two can be laid side by side.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope_kernels.convert import candidate_layers, fp8_layers
from fp8scope_kernels.formats import Format
from fp8scope_kernels.linear import Fp8Linear
from fp8scope_kernels.quantization import Extent, measure
from fp8scope_kernels.recipes import ROLES, Role
from fp8scope_kernels.statistics import STATISTICS, Slot, StatisticsBuffer

SCALE, NONFINITE = STATISTICS.index("scale"), STATISTICS.index("nonfinite")


def observe(model: nn.Module, buffer: StatisticsBuffer) -> int:
    """Bind the model's tensors to rows of `buffer`; returns how many are bound.

    Observed are the input, weight and grad_output of every `Fp8Linear` and of every `candidate_layers`, which
    could be one. Of the latter nothing is quantised: the catalogue names no format, `numel`, `amax` and
    `nonfinite` are counted, `scale` is 1 and nothing saturates or flushes. Names are
    `<module path>.<input|weight|grad_output>`. Calling it again, after modules were added, binds the new ones
    and keeps the rows of the others. Raises ValueError if a layer is on another device than the buffer.
    """
    layers = observable_layers(model)
    for path, layer in layers:
        if layer.weight.device != buffer.device:
            raise ValueError(
                f"{path or 'the model'} is on {layer.weight.device}, but the statistics buffer is on "
                f"{buffer.device}; make one buffer per device."
            )
    for path, layer in layers:
        observe_layer(path, layer, buffer)
    return len(ROLES) * len(layers)


def observe_layer(path: str, layer: nn.Linear, buffer: StatisticsBuffer) -> None:
    """Bind the three tensors of one of `observable_layers` to rows of `buffer`, which is on its device."""
    if isinstance(layer, Fp8Linear):
        layer.slots.update(_register(path, layer, buffer))
    else:
        _observer_of(layer).slots.update(_register(path, layer, buffer))


def observable_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The layers that `observe` binds, with their paths: FP8 ones first."""
    return [*fp8_layers(model), *candidate_layers(model)]


def unobserve(model: nn.Module) -> None:
    """Undo `observe`: nothing is counted any more."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.slots.clear()
        else:
            for key, hook in list(module._forward_hooks.items()):
                if isinstance(hook, HighPrecisionObserver):
                    del module._forward_hooks[key]


class HighPrecisionObserver:
    """A forward hook that writes a high-precision layer's tensors to the statistics buffer.

    `on_error` is told what goes wrong in it; without one, exceptions pass through to the forward call.
    Subclasses write other statistics: see `write`.
    """

    on_error: Callable[[Exception], None] | None = None

    def __init__(self) -> None:
        self.slots: dict[Role, Slot] = {}

    # Counting is a side effect on a buffer that moves when it grows: compiled graphs break here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self.slots or not layer.training:
            return
        # A forward call inside a backward pass recomputes what activation checkpointing dropped.
        recomputing = torch._C._current_graph_task_id() != -1
        if not recomputing:
            self._count("input", inputs[0] if inputs else None)
            self._count("weight", getattr(layer, "weight", None))
        # Whichever of the two calls the gradient flows through, it flows through one of them only.
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._count_gradient)  # type: ignore[no-untyped-call]

    def _count_gradient(self, gradient: Tensor) -> None:
        self._count("grad_output", gradient)

    def _count(self, role: Role, x: Any) -> None:
        slot = self.slots.get(role)
        if slot is None or not isinstance(x, Tensor) or not x.is_floating_point():
            return
        try:
            with torch.no_grad():
                # Of a sharded tensor each rank sees its part; the parts add up.
                part = x.to_local() if hasattr(x, "to_local") else x
                self.write(role, slot, part.detach())
        except Exception as error:
            if self.on_error is None:
                raise
            self.on_error(error)

    def write(self, role: Role, slot: Slot, x: Tensor) -> None:
        """Add the statistics of one call's tensor to its row."""
        add_extent(slot.row, x.numel(), measure(x))
        slot.row[SCALE].fill_(1.0)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model is another model: its tensors must not be counted in this one's rows.
        return {"slots": {}}


def add_extent(row: Tensor, elements: int, extent: Extent) -> None:
    """Add what is known of a tensor that is not quantised: `numel`, `amax` and `nonfinite`."""
    numel, amax, _, nonfinite = row.tensor_split((1, 2, NONFINITE))
    numel += elements
    torch.maximum(amax, extent.amax, out=amax)
    nonfinite += extent.nonfinite


def _observer_of(layer: nn.Linear) -> HighPrecisionObserver:
    """The layer's observer, hooked in where it has none."""
    for hook in layer._forward_hooks.values():
        if isinstance(hook, HighPrecisionObserver):
            return hook
    observer = HighPrecisionObserver()
    layer.register_forward_hook(observer)
    return observer


def _register(path: str, layer: nn.Linear, buffer: StatisticsBuffer) -> dict[Role, Slot]:
    shapes: dict[Role, tuple[int, ...]] = {
        "input": (-1, layer.in_features),
        "weight": (layer.out_features, layer.in_features),
        "grad_output": (-1, layer.out_features),
    }
    slots: dict[Role, Slot] = {}
    for role in ROLES:
        format: Format | None = layer.recipe.format_of(role) if isinstance(layer, Fp8Linear) else None
        name = f"{path}.{role}" if path else role
        slots[role] = buffer.register(name, format=format, shape=shapes[role], role=role)
    return slots
