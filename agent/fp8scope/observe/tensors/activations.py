"""Kurtosis of the inputs of linear layers, in sampled steps.

An outlier that is growing shows in the kurtosis long before it is so large that FP8 loses the other elements
of the tensor. See docs/watching.md for the definition.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.observe.tensors.base import OnError, inside_backward, is_traced, local, path_of
from fp8scope.observe.tensors.buffers import StatisticsTable, StatisticsTables
from fp8scope_kernels.hooks import register_forward_hook, remove_hooks
from fp8scope_kernels.torch_internals import is_functorch_wrapped_tensor

KURTOSIS_ELEMENTS = 2**17
"""Elements of an input, whole rows of it, from which its kurtosis is computed."""


@torch.no_grad()
def kurtosis(x: Tensor, elements: int = KURTOSIS_ELEMENTS) -> Tensor:
    """Return mean((x - m)^4) / mean((x - m)^2)^2 with the mean m: float64 [], 3 for normal values.

    Larger tensors, [..., features], are represented by evenly spaced rows with at most `elements` elements in
    all, but at least one row. The mean is subtracted first, so that nothing cancels. NaN where it is not
    defined: for constants, for empty tensors, and if an element is not finite.
    """
    rows = local(x.detach())
    rows = rows.reshape(-1, rows.shape[-1]) if rows.dim() else rows.reshape(1, 1)
    stride = -(-rows.numel() // max(elements, 1)) or 1
    # Odd, so that it takes all positions of sequences whose length is a power of two.
    values = rows[:: stride | 1].double()
    squares = (values - values.mean()).square_()
    result: Tensor = squares.square().mean() / squares.mean().square()
    return result


class Trail:
    """The observed linear layer that was called last in a sampled step: tells what calls the attention."""

    def __init__(self) -> None:
        self.path = ""
        """Empty outside of a model's forward pass."""

    @property
    def module(self) -> str:
        """The path of the module that the layer belongs to; empty if there is none."""
        return self.path.rpartition(".")[0]


class LayerInputs:
    """Notes `kurtosis` of the inputs that other sources observe. Make it after them."""

    every_step = False
    recipe: Mapping[str, Any] = {}
    tensors = 0

    def __init__(self, model: nn.Module, tables: StatisticsTables, trail: Trail, on_error: OnError) -> None:
        places = {
            info.name: (table, row)
            for table in tables.all
            for row, info in enumerate(table.buffer.catalogue)
            if info.role == "input"
        }
        for path, module in model.named_modules():
            _remove_hooks(module)
            name = path_of(path)
            position = places.get(f"{name}.input" if name else "input")
            if position is not None:
                hook = InputHook(name, tables, *position, trail, on_error)
                tables.sampling_hooks.add(module, "_forward_pre_hooks", hook, on_error)
        self._end = register_forward_hook(model, EndHook(trail), always_call=True)

    def close(self) -> None:
        """Remove the hook of the model; those of the layers belong to the tables."""
        self._end.remove()

    def finish(self, sampled: bool) -> None:
        pass


class InputHook:
    """Notes the kurtosis of one layer's input; of several calls in a step, the largest. Never raises."""

    def __init__(
        self,
        path: str,
        tables: StatisticsTables,
        table: StatisticsTable,
        row: int,
        trail: Trail,
        on_error: OnError,
    ) -> None:
        self._tables: StatisticsTables | None = tables
        self._path, self._table, self._row, self._trail = path, table, row, trail
        self._on_error = on_error

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        # First: a compiled graph then contains nothing of this.
        if is_traced():
            return
        tables = self._tables
        if tables is None or not tables.sampling or not layer.training or inside_backward():
            return
        try:
            self._trail.path = self._path
            x = inputs[0] if inputs else None
            # Inside of torch.func's transforms there are no values.
            if isinstance(x, Tensor) and x.is_floating_point() and not is_functorch_wrapped_tensor(x):
                self._table.note_largest("kurtosis", self._row, kurtosis(x))
        except Exception as error:
            self._on_error(error)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model is another model.
        return {"_tables": None}


class EndHook:
    """Clears the trail when the model's forward pass ends."""

    def __init__(self, trail: Trail) -> None:
        self._trail: Trail | None = trail

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not is_traced() and self._trail is not None:
            self._trail.path = ""

    def __getstate__(self) -> dict[str, Any]:
        return {"_trail": None}


def _remove_hooks(module: nn.Module) -> None:
    remove_hooks(module._forward_pre_hooks, InputHook)
    remove_hooks(module._forward_hooks, EndHook, module._forward_hooks_always_called)
