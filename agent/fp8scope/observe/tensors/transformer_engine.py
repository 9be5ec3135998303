"""Reads amax and scale of Transformer Engine's modules under delayed scaling from their `fp8_meta`.

`fp8_meta["scaling_fwd"]` and `["scaling_bwd"]` hold `scale` [tensors] and `amax_history` [length, tensors].
Each product has three forward tensors (input, weight, output) and two backward ones (gradients of output and
input). A cast writes the tensor's amax to row 0. At the end of the outermost autocast or of the backward pass
TE rolls the history by one row, so that row 0 becomes the last row, sets row 0 to zero and computes the next
scale (`nvte_delayed_scaling_recipe_amax_and_scale_update` in TE's C API). The newest amax is therefore row 0
if it is not zero, else the last row.

Modules do not keep the scales of current scaling, of blocks or of MXFP8, so these cannot be read.

Written from TE 2's documentation and tested with modules of the same layout; not yet run on hardware.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from fp8scope.observe.tensors.base import OnError, inside_backward, path_of
from fp8scope.observe.tensors.buffers import AMAX, NUMEL, SCALE, StatisticsTable, StatisticsTables
from fp8scope.observe.tensors.layers import note_delayed
from fp8scope_kernels import E4M3, E5M2, Format, Slot, in_encoding
from fp8scope_kernels.devices import capabilities_of
from fp8scope_kernels.hooks import register_forward_hook, register_tensor_hook, remove_hooks
from fp8scope_kernels.torch_internals import break_graph

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
PER_PRODUCT = {FORWARD: 3, BACKWARD: 2}


class TransformerEngineLayers:
    """The model's modules with an `fp8_meta`. Their tensors appear once they have run in FP8."""

    every_step = True
    recipe: Mapping[str, Any] = {}

    def __init__(self, model: nn.Module, tables: StatisticsTables, on_error: OnError) -> None:
        self._layers: list[Layer] = []
        for path, module in model.named_modules():
            weights = _weights(module)
            if isinstance(getattr(module, "fp8_meta", None), dict) and weights:
                table = tables.on(weights[0].device)
                self._layers.append(Layer(path_of(path), module, weights, table, on_error))
        self.tensors = sum(3 * len(layer.products) for layer in self._layers)
        if self._layers:
            self.recipe = {"recipe": "transformer_engine"}

    def finish(self, sampled: bool) -> None:
        for layer in self._layers:
            layer.finish(sampled)


def _weights(module: nn.Module) -> list[Tensor]:
    """Return the weight matrices of the module's products in order: float [out, in] each."""
    own = module.named_parameters(recurse=False)
    return [parameter for name, parameter in own if "weight" in name and parameter.dim() == 2]


class Layer:
    """One module, which is read after its forward pass and before and after its backward pass."""

    def __init__(
        self, path: str, module: nn.Module, weights: list[Tensor], table: StatisticsTable, on_error: OnError
    ) -> None:
        self.products = [tuple(weight.shape) for weight in weights]
        self._path = path
        self._table = table
        self._on_error = on_error
        self._module = weakref.ref(module)
        self._slots: dict[tuple[str, int], Slot] = {}
        self._tokens = 0
        self._backward_pending = False
        remove_hooks(module._forward_hooks, ForwardHook)
        register_forward_hook(module, ForwardHook(self))

    @property
    def _meta(self) -> Mapping[str, Any]:
        module = self._module()
        meta: Mapping[str, Any] = getattr(module, "fp8_meta", {}) if module is not None else {}
        return meta

    def after_forward(self, x: Tensor) -> None:
        """Read the amax and the scale of input and weight; called after the module has cast them."""
        self._tokens = x.numel() // max(x.shape[-1], 1)
        state = _delayed(self._meta.get(FORWARD))
        if state is not None:
            self._write(FORWARD, state, _newest(state.amax_history), state.scale)

    def before_backward(self) -> None:
        """Copy the scale that the gradient will be cast with; called when it reaches the module."""
        state = _delayed(self._meta.get(BACKWARD))
        if state is None:
            return
        self._take_backward(state)
        # Register slots here: at the end of the step its catalogue is already closed.
        for product in range(len(self.products)):
            if PER_PRODUCT[BACKWARD] * product < len(state.scale):
                self._slot(BACKWARD, PER_PRODUCT[BACKWARD] * product, product, "grad_output")
        # A copy: TE updates the scale in place before the step ends.
        self._used = state.scale.clone()
        self._backward_pending = True

    def finish(self, sampled: bool) -> None:
        try:
            meta = self._meta
            backward = _delayed(meta.get(BACKWARD))
            if backward is not None:
                self._take_backward(backward)
            for direction, state in ((FORWARD, _delayed(meta.get(FORWARD))), (BACKWARD, backward)):
                slots = {at: slot for (way, at), slot in self._slots.items() if way == direction}
                if sampled and state is not None and slots:
                    histories = [state.amax_history[:, at] for at in slots]
                    note_delayed(self._table, list(slots.values()), histories)
        except Exception as error:
            self._on_error(error)

    def _take_backward(self, state: Any) -> None:
        if self._backward_pending:
            self._backward_pending = False
            self._write(BACKWARD, state, _newest(state.amax_history), self._used)

    def _write(self, direction: str, state: Any, amax: Tensor, scale: Tensor) -> None:
        for product, (rows, columns) in enumerate(self.products):
            sizes = {"grad_output": rows * self._tokens}
            if direction == FORWARD:
                sizes = {"input": columns * self._tokens, "weight": rows * columns}
            for offset, (role, numel) in enumerate(sizes.items()):
                at = PER_PRODUCT[direction] * product + offset
                if at >= len(scale):
                    continue
                row = self._slot(direction, at, product, role).row
                row[NUMEL] += numel
                row[AMAX] = torch.maximum(row[AMAX], amax[at].double())
                row[SCALE] = scale[at]
                # TE does not count what saturates or flushes.
                row[SCALE + 1 :] = torch.nan

    def _slot(self, direction: str, at: int, product: int, role: str) -> Slot:
        slot = self._slots.get((direction, at))
        if slot is None:
            rows, columns = self.products[product]
            shapes = {"input": (-1, columns), "weight": (rows, columns), "grad_output": (-1, rows)}
            inside = f".gemm{product + 1}" if len(self.products) > 1 else ""
            slot = self._table.buffer.register(
                f"{self._path}{inside}.{role}".lstrip("."),
                format=_format(self._meta, self._table.buffer.device, backward=direction == BACKWARD),
                shape=shapes[role],
                role=role,
            )
            self._slots[direction, at] = slot
        return slot

    def report(self, error: Exception) -> None:
        self._on_error(error)


class ForwardHook:
    """The hook in the module. In a copy of the model it does nothing."""

    def __init__(self, layer: Layer | None) -> None:
        self._layer = layer

    @break_graph
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        layer = self._layer
        if layer is None or not module.training or inside_backward():
            return
        try:
            if inputs and isinstance(inputs[0], Tensor):
                layer.after_forward(inputs[0])
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.requires_grad:
                register_tensor_hook(first, self._on_gradient)
        except Exception as error:
            layer.report(error)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _on_gradient(self, gradient: Tensor) -> None:
        if self._layer is not None:
            try:
                self._layer.before_backward()
            except Exception as error:
                self._layer.report(error)

    def __getstate__(self) -> dict[str, Any]:
        return {"_layer": None}


def _delayed(state: Any) -> Any:
    """Return the state if it is of delayed scaling and has a history, else None."""
    history, scale = getattr(state, "amax_history", None), getattr(state, "scale", None)
    if not isinstance(history, Tensor) or not isinstance(scale, Tensor) or history.dim() != 2:
        return None
    return state if history.numel() else None


def _newest(history: Tensor) -> Tensor:
    """Return the newest amax of each tensor, float [tensors], from a history [length, tensors]."""
    return torch.where(history[0] != 0, history[0], history[-1])


def _format(meta: Mapping[str, Any], device: torch.device, *, backward: bool) -> Format:
    """Return the format of the recipe in `meta`, as the device encodes it.

    The default is HYBRID: E4M3 forward, E5M2 backward.
    """
    name = getattr(getattr(meta.get("recipe"), "fp8_format", None), "name", "HYBRID")
    format = E5M2 if name == "E5M2" or (backward and name == "HYBRID") else E4M3
    return in_encoding(format, capabilities_of(device).encoding)
