"""What the optimizer holds and does, in sampled steps: gradients of the weights, moments and updates.

Observed are the matrices (two or more dimensions) among the parameters. Hooks of the optimizer run just
before and just after it steps, so that gradients are seen as it sees them: accumulated, clipped and unscaled.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.observe.tensors.base import OnError, local, path_of
from fp8scope.observe.tensors.buffers import NONFINITE, SCALE, Boards
from fp8scope.observe.timing.gradients import has_closure
from fp8scope_kernels import Fp8AdamW, Slot, measure
from fp8scope_kernels.observers import add_extent
from fp8scope_kernels.quantization import Extent

UPDATE_ELEMENTS = 2**15
"""Elements of a weight that are kept over an optimizer step to see how they change: all of them, or as many,
evenly spaced. It bounds the memory that this takes."""

MAX_MOMENTS = 6


class TrainingState:
    """The gradients, updates and moments of the model's matrices under `optimizer`, neither of which it keeps
    alive.
    """

    every_step = True
    recipe: Mapping[str, Any] = {}

    def __init__(self, model: nn.Module, optimizer: Optimizer, boards: Boards, on_error: OnError) -> None:
        self._boards = boards
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
        optimizer.register_step_pre_hook(_Hook(self._before_step))
        optimizer.register_step_post_hook(_Hook(self._after_step))

    def close(self) -> None:
        """Take the hooks away."""
        optimizer = self._optimizer()
        if optimizer is not None:
            _remove_hooks(optimizer)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices that are still there."""
        for name, reference in self._matrices.items():
            parameter = reference()
            if parameter is not None:
                yield name, parameter

    def _bind_fp8(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Our own optimizer counts what its quantisation does, in every step; returns how many tensors."""
        self._counts_itself = isinstance(optimizer, Fp8AdamW) and optimizer.level != "O1"
        first = next(self._parameters(), None)
        if not self._counts_itself or first is None:
            return 0
        assert isinstance(optimizer, Fp8AdamW)
        board = self._boards.on(first[1].device)
        named = [(path_of(name), parameter) for name, parameter in model.named_parameters()]
        return optimizer.observe(board.buffer, named)

    def finish(self, sampled: bool) -> None:
        self._before.clear()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._boards.sampling:
            return
        # A closure has yet to compute the gradients.
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
            if not self._counts_itself:
                self._note_moments(name, parameter, optimizer.state.get(parameter, {}))
        self._before.clear()
        for device, found in ratios.items():
            together = torch.stack([ratio for _, ratio in found])
            known = torch.where(torch.isfinite(together), together, torch.nan)
            board = self._boards.on(device, every_step=False)
            board.note("update_ratio", [slot for slot, _ in found], known)

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
            board = self._boards.on(parameter.device, every_step=False)
            shape = tuple(parameter.shape)
            slot = board.buffer.register(f"{name}.{role}", format=None, shape=shape, role=role)
            self._slots[name, role] = slot
        return slot


def _note_update(slot: Slot, parameter: Tensor, before: Tensor) -> Tensor:
    """Write how a parameter has changed; returns norm(update) / norm(weight), without dimensions."""
    before = before.double()
    update = _spread(parameter).double() - before
    _write(slot, update.numel(), measure(update))
    ratio: Tensor = update.norm() / before.norm()
    return ratio


class _Hook:
    """An optimizer's hook that raises nothing, and can be told from those of others."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            self._call(optimizer, args, kwargs)
        except Exception as error:
            self._call.__self__._on_error(error)


def _remove_hooks(optimizer: Optimizer) -> None:
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, _Hook):
                del hooks[key]


def _write(slot: Slot, elements: int, extent: Extent) -> None:
    add_extent(slot.row, elements, extent)
    slot.row[SCALE:NONFINITE].fill_(torch.nan)


def _spread(parameter: Tensor) -> Tensor:
    """At most UPDATE_ELEMENTS of this rank's elements, evenly spaced."""
    flat = local(parameter.detach()).reshape(-1)
    return flat[:: -(-flat.numel() // UPDATE_ELEMENTS) or 1]
