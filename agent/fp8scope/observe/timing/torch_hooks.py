"""Hooks on a watched model and its optimizer that measure a step. They are removed when the run ends.

The hooks of a copied or unpickled model measure nothing. In a graph that torch compiles the hooks disappear:
they neither break the graph nor become part of it. The hooks of a compiled model stay outside of its graph.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook

from fp8scope.guard import Guard
from fp8scope.observe.budget import TimeBudget
from fp8scope.observe.compiled_calls import Handle, around_compiled_calls
from fp8scope.observe.tensors.base import inside_backward, is_traced
from fp8scope.observe.timing.clock import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    Clock,
    DeviceClock,
    HostClock,
)
from fp8scope.observe.timing.flops import FlopCounter, FlopModel, Signature, shapes_of, training_precision
from fp8scope.observe.timing.gradients import gradient_norm, has_closure, learning_rates
from fp8scope_kernels import devices
from fp8scope_kernels.hooks import (
    HookHandle,
    register_forward_hook,
    register_forward_pre_hook,
    register_step_post_hook,
    register_step_pre_hook,
    register_tensor_hook,
)

MAX_OUTPUTS = 8
"""Tensors of a model's output whose gradients mark the beginning of the backward pass."""


class Stopwatch:
    """The clock and the operations of the current step, shared by all hooks of a run."""

    def __init__(self, guard: Guard, budget: TimeBudget) -> None:
        self.guard = guard
        self.budget = budget
        self.clock: Clock = HostClock()
        self.device: torch.device | None = None
        self.flops = 0.0
        self.inside: object | None = None
        """The model whose forward call is running; a model that it calls measures nothing."""
        self.in_backward = False
        self.idle = DATA
        self.precision = ""
        """That of the first model's first training pass; empty if it is not known."""

    def is_off(self) -> bool:
        """Return whether a graph is being compiled, or activations are recomputed in a backward pass."""
        return is_traced() or inside_backward()

    def place(self, device: torch.device) -> None:
        """Set the model's device, which is known with the first call."""
        self.device = device
        if devices.has_events(device):
            self.clock = DeviceClock(device)
            self.clock.begin()

    def end_of_step(self) -> float:
        """Return the operations of the step that ended, and start from zero."""
        flops, self.flops = self.flops, 0.0
        self.inside, self.in_backward = None, False
        return flops


class ModelHooks:
    """Times the forward and backward passes of one model, and counts their operations."""

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        self._watch: Stopwatch | None = watch
        self.was_called = False
        self._flops: FlopModel | None = FlopModel(model)
        self._shapes: Signature = ()
        self._counter: FlopCounter | None = None
        self._handles: list[HookHandle | Handle] = [
            register_forward_pre_hook(model, self.before_forward, prepend=True, with_kwargs=True),
            register_forward_hook(model, self.after_forward, with_kwargs=True, always_call=True),
            *around_compiled_calls(model, self.before_forward, self.after_forward),
        ]

    def remove(self) -> None:
        self._watch = self._flops = None
        for handle in self._handles:
            handle.remove()

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        watch = self._watch
        if watch is None or watch.budget.is_light or watch.is_off() or watch.inside not in (None, self):
            return
        self.was_called = True
        try:
            watch.inside = self
            if not model.training:
                # The time up to and in an evaluation is not spent waiting for data.
                watch.clock.mark(OTHER)
                watch.idle = OTHER
                return
            if watch.device is None and (parameter := next(model.parameters(), None)) is not None:
                watch.place(parameter.device)
            watch.clock.mark(watch.idle)
            watch.idle = OTHER
            if torch.is_grad_enabled():
                self._begin_counting(args, kwargs)
        except Exception as error:
            watch.guard.caught("measuring a forward pass", error)

    def _begin_counting(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert self._flops is not None
        self._shapes = shapes_of(args, kwargs)
        self._counter = self._flops.begin(self._shapes)
        if self._counter is not None:
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def after_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        watch = self._watch
        if watch is None or watch.inside is not self or watch.is_off():
            return
        began = perf_counter()
        try:
            watch.inside = None
            counter, self._counter = self._counter, None
            if counter is not None:
                counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            # A forward pass that raised has the output None.
            if not model.training or output is None:
                watch.clock.mark(OTHER)
                return
            watch.clock.mark(FORWARD)
            if torch.is_grad_enabled() and self._flops is not None:
                if counter is not None:
                    self._flops.end(self._shapes, counter)
                if not watch.precision:
                    watch.precision = training_precision(model, counter)
                watch.flops += self._flops.step_flops(self._shapes, args, kwargs)
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    register_tensor_hook(tensor, self._backward_begins)
        except Exception as error:
            watch.guard.caught("measuring a forward pass", error)
        watch.budget.fixed_seconds += perf_counter() - began

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _backward_begins(self, gradient: Tensor) -> None:
        watch = self._watch
        if watch is None or watch.in_backward or is_traced():
            return
        try:
            watch.in_backward = True
            watch.clock.mark(OTHER)
            # Queue again from the first callback, to run after others, such as that of DDP's reducer.
            _at_the_end_of_backward(lambda: _at_the_end_of_backward(self._backward_ended))
        except Exception as error:
            watch.guard.caught("measuring a backward pass", error)

    def _backward_ended(self) -> None:
        watch = self._watch
        if watch is not None:
            try:
                watch.in_backward = False
                watch.clock.mark(BACKWARD)
                watch.idle = DATA
            except Exception as error:
                watch.guard.caught("measuring a backward pass", error)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict.fromkeys(("_watch", "_flops", "_counter"))
        return state | {"_shapes": (), "_handles": [], "was_called": False}


class OptimizerHooks:
    """Measures an optimizer's steps, its learning rates and its gradient norm."""

    def __init__(self, optimizer: torch.optim.Optimizer, watch: Stopwatch, offset: int) -> None:
        self._watch = watch
        self._offset = offset
        self.rates: dict[str, Any] = {}
        self.norm: tuple[Tensor | float, bool] | None = None
        # If `step` calls the inherited `step`, both call the hooks.
        self._depth = 0
        self._handles = [
            register_step_pre_hook(optimizer, self.before_step),
            register_step_post_hook(optimizer, self.after_step),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch.budget.is_light or is_traced():
            return
        self._depth += 1
        if self._depth > 1:
            return
        budget, began = self._watch.budget, perf_counter()
        norms = budget.norm_seconds
        try:
            self._watch.clock.mark(OTHER)
            self.rates = learning_rates(optimizer, self._offset)
            # The closure has not computed the gradients yet.
            self.norm = None if has_closure(args, kwargs) else self._take_norm(optimizer)
            # The time of measuring does not belong to the optimizer.
            self._watch.clock.mark(OTHER)
        except Exception as error:
            self._watch.guard.caught("measuring an optimizer step", error)
        budget.fixed_seconds += perf_counter() - began - (budget.norm_seconds - norms)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch.budget.is_light or is_traced():
            return
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        try:
            self._watch.clock.mark(OPTIMIZER)
            self._watch.idle = DATA
            if has_closure(args, kwargs):
                self.norm = self._take_norm(optimizer)
                self._watch.clock.mark(OTHER)
        except Exception as error:
            self._watch.guard.caught("measuring an optimizer step", error)

    def _take_norm(self, optimizer: torch.optim.Optimizer) -> "tuple[Tensor | float, bool] | None":
        budget = self._watch.budget
        if not budget.takes_norm:
            return None
        began = perf_counter()
        norm = gradient_norm(optimizer)
        budget.norm_seconds += perf_counter() - began
        return norm

    def end_of_step(self) -> None:
        """Reset the state of the step that ended, also if the optimizer's step raised."""
        self.norm, self.rates = None, {}
        self._depth = 0


def _at_the_end_of_backward(call: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(call)


def _tensors(output: Any, depth: int = 0) -> list[Tensor]:
    """Yield the first tensors of a model's output: a tensor, or sequences and mappings of them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if not isinstance(output, list | tuple) or depth > 2:
        return []
    return [tensor for item in output[:MAX_OUTPUTS] for tensor in _tensors(item, depth + 1)][:MAX_OUTPUTS]
