"""Hooks on a watched model and its optimizer that measure a step. They are removed when the run ends.

The hooks of a copied or unpickled model measure nothing. In a graph that torch compiles the hooks disappear:
they neither break the graph nor become part of it. The hooks of a compiled model stay outside of its graph.
"""

from collections.abc import Callable, Mapping
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook

from fp8scope.guard import Guard
from fp8scope.observe.budget import TimeBudget
from fp8scope.observe.compiled_calls import Handle, around_compiled_calls
from fp8scope.observe.facts import TrainingFacts
from fp8scope.observe.tensors.base import inside_backward, is_traced
from fp8scope.observe.timing import interruptions
from fp8scope.observe.timing.anatomy import COMMUNICATION
from fp8scope.observe.timing.clock import (
    BACKWARD,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    Clock,
    DeviceClock,
    HostClock,
)
from fp8scope.observe.timing.flops import FlopCounter, FlopModel, Signature, shapes_of, training_precision
from fp8scope.observe.timing.gradients import gradient_norm, has_closure, learning_rates
from fp8scope.observe.timing.recomputation import Recomputation
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
        self.recomputed = 0.0
        """Operations that activation checkpointing repeats in the step; NaN if unknown."""
        self.inside: object | None = None
        """The model whose forward call is running; a model that it calls measures nothing."""
        self.in_backward = False
        self.idle = DATA
        self.precision = ""
        """That of the first model's first training pass; empty if it is not known."""
        self.thread = get_ident()
        """The thread that trains; 0 in a forked child that does not."""
        self._is_interrupted = False
        self.facts = TrainingFacts()
        interruptions.listen(self)

    def close(self) -> None:
        """Time no more interruptions."""
        interruptions.stop(self)

    def enter(self) -> bool:
        """An interruption begins. Returns whether it is timed: not inside of another one."""
        if self.budget.is_light or self._is_interrupted:
            return False
        # On an accelerator, another thread carries out the backward pass.
        if get_ident() != self.thread and not (self.in_backward and inside_backward()):
            return False
        try:
            self.clock.enter()
        except Exception as error:
            self.guard.caught("measuring an interruption", error)
            return False
        self._is_interrupted = True
        return True

    def leave(self, part: int) -> None:
        """The interruption ends, and was this part of the anatomy."""
        if not self._is_interrupted:
            # The step has ended meanwhile.
            return
        self._is_interrupted = False
        try:
            self.clock.leave(part)
        except Exception as error:
            self.guard.caught("measuring an interruption", error)

    def copied(self, source: Tensor, copy: Tensor) -> None:
        """A tensor of the host was copied to an accelerator."""
        self.facts.note_copy(source, copy)

    def loaded(self, batches: Any) -> None:
        """A loader has handed over a batch; `batches` is its iterator."""
        self.facts.note_loader(batches)

    def is_off(self) -> bool:
        """Return whether a graph is being compiled, or activations are recomputed in a backward pass."""
        return is_traced() or inside_backward()

    def place(self, device: torch.device) -> None:
        """Set the model's device, which is known with the first call."""
        self.device = device
        if devices.has_events(device):
            self.clock = DeviceClock(device)
            self.clock.begin()
            interruptions.listen_to_copies()

    def end_of_step(self) -> tuple[float, float]:
        """Return the operations of the step that ended and those recomputed, and start from zero."""
        flops = self.flops, self.recomputed
        self.flops = self.recomputed = 0.0
        self.facts.steps += 1
        self.inside, self.in_backward, self._is_interrupted = None, False, False
        return flops


class ModelHooks:
    """Times the forward and backward passes of one model, and counts their operations."""

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        self._watch: Stopwatch | None = watch
        watch.facts.note_model(model)
        self.was_called = False
        self._flops: FlopModel | None = FlopModel(model)
        self._shapes: Signature = ()
        self._counter: FlopCounter | None = None
        self._recomputation: Recomputation | None = None
        self._handles: list[HookHandle | Handle] = [
            register_forward_pre_hook(model, self.before_forward, prepend=True, with_kwargs=True),
            register_forward_hook(model, self.after_forward, with_kwargs=True, always_call=True),
            *around_compiled_calls(model, self.before_forward, self.after_forward),
        ]

    def remove(self) -> None:
        self._watch = self._flops = None
        self._end_recomputation()
        for handle in self._handles:
            handle.remove()

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        watch = self._watch
        if watch is None or watch.budget.is_light or watch.is_off() or watch.inside not in (None, self):
            return
        self.was_called = True
        try:
            watch.inside, watch.thread = self, get_ident()
            watch.facts.note_pass(is_training=model.training and torch.is_grad_enabled())
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
                self._begin_counting(model, args, kwargs)
        except Exception as error:
            watch.guard.caught("measuring a forward pass", error)

    def _begin_counting(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert self._flops is not None
        self._shapes = shapes_of(args, kwargs)
        self._counter = self._flops.begin(self._shapes)
        if self._counter is not None:
            self._end_recomputation()
            self._recomputation = Recomputation(model)
            self._counter.__enter__()

    def _end_recomputation(self) -> float:
        """Return the operations that were recomputed since the last count began."""
        recomputation, self._recomputation = self._recomputation, None
        return recomputation.end() if recomputation is not None else 0.0

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
                counter.__exit__(None, None, None)
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
                if counter is not None and counter.flops:
                    watch.facts.note_products(model, counter)
                flops = self._flops.step_flops(self._shapes, args, kwargs)
                watch.flops += flops
                if self._recomputation is None:
                    watch.recomputed += self._flops.recomputed(flops)
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
            watch.clock.mark(LOSS)
            _at_the_end_of_backward(self._gradients_ready)
        except Exception as error:
            watch.guard.caught("measuring a backward pass", error)

    def _gradients_ready(self) -> None:
        """Called when all gradients are computed, before the callbacks that others have queued meanwhile.

        Those of data parallelism wait for the reduction of the gradients: what is left of it is not hidden
        behind the backward pass.
        """
        watch = self._watch
        waits = watch is not None and interruptions.are_ranks_connected() and watch.enter()

        def ended() -> None:
            if waits and watch is not None:
                watch.leave(COMMUNICATION)
            self._backward_ended()

        # Queued from this callback, it runs after those of others.
        _at_the_end_of_backward(ended)

    def _backward_ended(self) -> None:
        watch = self._watch
        if watch is not None:
            try:
                watch.in_backward = False
                watch.clock.mark(BACKWARD)
                if self._recomputation is not None and self._flops is not None:
                    repeated = self._end_recomputation()
                    watch.recomputed += repeated
                    self._flops.note_recomputation(self._shapes, repeated)
                watch.idle = DATA
            except Exception as error:
                watch.guard.caught("measuring a backward pass", error)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict.fromkeys(("_watch", "_flops", "_counter", "_recomputation"))
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
