"""Observes weight gradients, moments and updates of an optimizer in sampled steps.

Only parameters with two or more dimensions are observed. The hooks run right before and after the optimizer's
step, so they see the gradients that it uses: accumulated, clipped and unscaled.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.observe.tensors.base import OnError, local, path_of
from fp8scope.observe.tensors.buffers import NONFINITE, SCALE, StatisticsTables
from fp8scope.observe.timing.gradients import has_closure
from fp8scope_kernels import Fp8AdamW, Slot, measure
from fp8scope_kernels.high_precision import add_extent
from fp8scope_kernels.hooks import register_step_post_hook, register_step_pre_hook, remove_hooks
from fp8scope_kernels.reference import Extent

UPDATE_ELEMENTS = 2**15
"""Elements of a weight, evenly spaced, that are copied before a step to compute the update."""

MAX_MOMENTS = 6


class OptimizerState:
    """Observes the gradients, updates and moments of a model's matrices. Keeps neither of the two alive."""

    every_step = True
    recipe: Mapping[str, Any] = {}

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, tables: StatisticsTables, on_error: OnError
    ) -> None:
        self._tables = tables
        self._on_error = on_error
        self._slots: dict[tuple[str, str], Slot] = {}
        self._before: dict[str, Tensor] = {}
        self._optimizer = weakref.ref(optimizer)
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self._matrices = {
            path_of(name): weakref.ref(parameter)
            for name, parameter in model.named_parameters()
            if parameter in stepped and parameter.dim() >= 2 and parameter.is_floating_point()
        }
        for name, parameter in self._parameters():
            for role in ("weight_grad", "update"):
                self._slot(name, parameter, role)
        self.tensors = len(self._slots) + self._bind_fp8(model, optimizer)
        _remove_hooks(optimizer)
        register_step_pre_hook(optimizer, _Hook(self._before_step, on_error))
        register_step_post_hook(optimizer, _Hook(self._after_step, on_error))

    def close(self) -> None:
        """Remove the hooks."""
        optimizer = self._optimizer()
        if optimizer is not None:
            _remove_hooks(optimizer)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices that still exist."""
        for name, reference in self._matrices.items():
            parameter = reference()
            if parameter is not None:
                yield name, parameter

    def _bind_fp8(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Let `Fp8AdamW` count its own quantisation in every step; returns the number of its tensors."""
        self.counts_itself = isinstance(optimizer, Fp8AdamW) and optimizer.level != "O1"
        first = next(self._parameters(), None)
        if not self.counts_itself or first is None:
            return 0
        assert isinstance(optimizer, Fp8AdamW)
        table = self._tables.on(first[1].device)
        named = [(path_of(name), parameter) for name, parameter in model.named_parameters()]
        return optimizer.observe(table.buffer, named)

    def finish(self, sampled: bool) -> None:
        self._before.clear()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._tables.sampling:
            return
        # The closure has not computed the gradients yet.
        if not has_closure(args, kwargs):
            self._note_gradients(optimizer)
        for name, parameter in self._parameters():
            self._before[name] = _spread(parameter).clone()

    def _note_gradients(self, optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        for name, parameter in self._parameters():
            gradient = parameter.grad
            slot = self._slot(name, parameter, "weight_grad")
            if gradient is None or gradient.layout != torch.strided:
                continue
            gradient = local(gradient)
            extent = measure(gradient)
            if isinstance(scale, Tensor):
                # A fused optimizer divides by the GradScaler's factor itself.
                extent = Extent(extent.amax / scale.reshape(()).to(gradient.device), extent.nonfinite)
            _write(slot, gradient.numel(), extent)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._before:
            return
        if has_closure(args, kwargs):
            self._note_gradients(optimizer)
        ratios: dict[torch.device, list[tuple[Slot, Tensor]]] = {}
        for name, parameter in self._parameters():
            before = self._before.get(name)
            if before is None or parameter.grad is None:
                continue
            slot = self._slot(name, parameter, "update")
            ratios.setdefault(before.device, []).append((slot, _note_update(slot, parameter, before)))
            if not self.counts_itself:
                self._note_moments(name, parameter, optimizer.state.get(parameter, {}))
        self._before.clear()
        for device, noted in ratios.items():
            values = torch.stack([ratio for _, ratio in noted])
            finite = torch.where(torch.isfinite(values), values, torch.nan)
            table = self._tables.on(device, every_step=False)
            table.note("update_ratio", [slot for slot, _ in noted], finite)

    def _note_moments(self, name: str, parameter: Tensor, state: Mapping[str, Any]) -> None:
        moments = [
            (key, value)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
        ]
        for key, value in moments[:MAX_MOMENTS]:
            part = local(value)
            _write(self._slot(name, parameter, key[:32]), part.numel(), measure(part))

    def _slot(self, name: str, parameter: Tensor, role: str) -> Slot:
        slot = self._slots.get((name, role))
        if slot is None:
            table = self._tables.on(parameter.device, every_step=False)
            shape = tuple(parameter.shape)
            slot = table.buffer.register(f"{name}.{role}", format=None, shape=shape, role=role)
            self._slots[name, role] = slot
        return slot


def _note_update(slot: Slot, parameter: Tensor, before: Tensor) -> Tensor:
    """Write the update of a parameter; returns norm(update) / norm(weight) as a 0-dimensional tensor."""
    before = before.double()
    update = _spread(parameter).double() - before
    _write(slot, update.numel(), measure(update))
    ratio: Tensor = update.norm() / before.norm()
    return ratio


class _Hook:
    """A hook of an optimizer that never raises, and that `_remove_hooks` can recognise."""

    def __init__(self, call: Any, on_error: OnError) -> None:
        self._call = call
        self._on_error = on_error

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            self._call(optimizer, args, kwargs)
        except Exception as error:
            self._on_error(error)


def _remove_hooks(optimizer: Optimizer) -> None:
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        remove_hooks(hooks, _Hook)


def _write(slot: Slot, elements: int, extent: Extent) -> None:
    add_extent(slot.row, elements, extent)
    slot.row[SCALE:NONFINITE].fill_(torch.nan)


def _spread(parameter: Tensor) -> Tensor:
    """Return at most UPDATE_ELEMENTS of this rank's elements, evenly spaced."""
    flat = local(parameter.detach()).reshape(-1)
    return flat[:: -(-flat.numel() // UPDATE_ELEMENTS) or 1]
