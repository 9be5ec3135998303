"""Finds the steps of a training loop that does not mark them, for `fp8scope.attach` and `fp8scope run`.

A step is one `optimizer.step()`; with several optimizers, at least one of each. It begins with the first
training forward pass (training mode, gradients enabled) after the previous step. Its clock stops when
`optimizer.step()` returns. It is recorded when the next step begins, so that values logged right after
`optimizer.step()` still belong to it.

If the script updates a model without an optimizer, a step ends when the model's parameters or gradients
change after a backward pass: they were updated, clipped, or zeroed for the next pass.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.autolog.followed_model import FollowedModel, ForwardNotifier
from fp8scope.autolog.inspection import parameters_of, token_count, unwrap_optimizer
from fp8scope.autolog.light_steps import MIN_STEPS, LightSteps
from fp8scope.autolog.loss_capture import Loss, combine, is_sole, listen, unlisten
from fp8scope.observe.compiled_calls import Handle, around_compiled_calls
from fp8scope.observe.tensors.base import unwrapped
from fp8scope_kernels.hooks import (
    HookHandle,
    register_forward_pre_hook,
    register_step_post_hook,
    register_step_pre_hook,
)

if TYPE_CHECKING:
    from fp8scope.run import Run
    from fp8scope.step import Step

PATIENCE = 100
"""Stop waiting for an optimizer that has not stepped in this many steps of another one."""


class Attachment:
    """Opens and closes the steps of a run as the training proceeds. Created by `fp8scope.attach`."""

    def __init__(
        self, run: "Run", *, reduction: str = "mean", tokens_per_step: int = 0, counts_inputs: bool = True
    ) -> None:
        self._run = run
        self._steps = run.session.steps
        self._budget = run.session.steps.budget
        self.hasher = run.session.hasher
        self._counts_inputs = counts_inputs
        self._reduction = reduction
        self._tokens_per_step = tokens_per_step
        self._followed: list[FollowedModel] = []
        self._pending: list[tuple[Loss, set[str]]] = []
        """Losses that no optimizer has used yet, each with the models whose gradients it changed."""
        self._handles: list[HookHandle | Handle] = []
        self._models: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        """The modules whose calls begin a step, and their names."""
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        """Every optimizer, and the name of the model that it trains."""
        self._awaited: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that must step before a step is complete."""
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped since the step began."""
        self._most_steps = 1
        """The most steps of an optimizer in one step of the training."""
        self._is_alone = False
        """Whether one optimizer trains one model. This is the usual case; it avoids the weak sets."""
        self.optimizer_steps = 0
        self._inside = False
        """Whether an optimizer is inside `step()`; forward and backward passes then come from its closure."""
        self._inside_losses = 0
        self._unseen = ""
        """Why the loss of a backward pass of this step is unknown."""
        self._forward_seen = False
        self._due = False
        self.skipped = 0
        """Steps that a scaler has skipped since the last recorded one."""
        self._light: LightSteps | None = None
        """Takes the light steps, once there are some."""
        self._steps_before = 0
        self._sees_values = False
        """Whether the script logs values of its own."""
        self._steps_once = False
        """Whether a step of the training calls the optimizer's hooks once."""
        self._step: Step | None = None
        listen(self)

    def follow(self, name: str, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Follow another model. `model` is the module that the script calls, including wrappers."""
        self._leave_light()
        self._followed.append(FollowedModel(name, model, optimizers))
        self._is_alone = False
        self.follow_calls(name, model)
        for optimizer in optimizers:
            self.follow_optimizer(name, optimizer)

    def follow_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Follow another optimizer of the named model. It replaces those that train the same parameters."""
        self._leave_light()
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        for awaited in list(self._awaited):
            if self._optimizers[awaited] == name and any(id(p) in own for p in parameters_of(awaited)):
                self._awaited.discard(awaited)
        for followed in self._followed:
            if followed.name == name:
                followed.by_hand = False
        self._optimizers[optimizer] = name
        self._awaited.add(optimizer)
        self._is_alone = len(self._optimizers) == 1 and len(self._followed) == 1
        before, after = self._hooks()
        self._handles.append(register_step_pre_hook(optimizer, before))
        self._handles.append(register_step_post_hook(optimizer, after))

    @property
    def optimizers(self) -> Mapping[Optimizer, str]:
        """The followed optimizers, each with the name of the model that it trains."""
        return self._optimizers

    def follow_calls(self, name: str, model: nn.Module) -> None:
        """Begin steps at forward passes of this module, which is the named model or a part of it."""
        self._leave_light()
        hook = ForwardNotifier(self, counts_tokens=self._counts_inputs and not self._models)
        self._handles.append(register_forward_pre_hook(model, hook, prepend=True, with_kwargs=True))
        self._handles += around_compiled_calls(model, hook)
        self._models[model] = name

    def name_of(self, model: nn.Module) -> str | None:
        """Return the name under which `model` is followed, or None if it is not."""
        return self._models.get(model)

    @property
    def is_complete(self) -> bool:
        """Return whether the work of the open step is done, or no step is open."""
        self._note_updates_by_hand()
        return self._step is None or self._due

    def complete(self) -> None:
        """Record the open step if its work is done; else forget it with its losses."""
        self._leave_light()
        if self.is_complete:
            self._close_if_due()
        else:
            self._step, self._forward_seen = None, False
            self._stepped.clear()
            self._steps.abandon_step()
        self._pending.clear()

    def end(self) -> None:
        """Record the step that is complete, and remove all hooks."""
        self._leave_light()
        unlisten(self)
        self._note_updates_by_hand(last=True)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close_if_due()
        self._warn_of_steps_that_waited()
        self._steps.abandon_step()
        self._step = None

    def _warn_of_steps_that_waited(self) -> None:
        """Say how many steps of an optimizer are left out, because those of another one did not follow."""
        waited = max((followed.steps for followed in self._followed), default=0)
        if waited > self._most_steps:
            self._run.guard.warn_once(
                "waited",
                "the last %d steps of an optimizer are not recorded: a step needs one of each optimizer, and "
                "another one has not stepped since. Models that are trained one after the other need a run "
                "each.",
                waited,
            )

    # Called by the hooks

    def forward_begins(self, tokens: int = 0) -> None:
        """Called when a training forward pass on this many tokens begins."""
        self._note_updates_by_hand()
        step = self._begin()
        self._forward_seen = True
        if step is not None and not self._tokens_per_step and self._inside_losses == 0:
            step.count_tokens(tokens)

    def hash_inputs(self, inputs: Iterable[Any]) -> None:
        """Add the inputs of a training forward pass to the step's `data_hash`, if that is asked for."""
        if self.hasher is not None and self._step is not None and self._inside_losses == 0:
            began = perf_counter()
            self.hasher.add(self._step, inputs)
            self._budget.fixed_seconds += perf_counter() - began

    def before_backward(self) -> Any:
        began = perf_counter()
        try:
            if self._light is not None and self._light.removed_hooks:
                self._light.restore_step_hooks()
            self._note_updates_by_hand()
            before = {followed.name: followed.gradients() for followed in self._followed}
            if not self._inside_losses:
                self._forget_discarded(before)
            self._budget.fixed_seconds += perf_counter() - began
            return before
        except Exception as error:
            self._run.guard.caught("looking at gradients", error)
        return {}

    def after_backward(self, before: Mapping[str, Any], loss: Loss | None) -> None:
        began = perf_counter()
        try:
            reached = {f.name for f in self._followed if f.is_reached(before.get(f.name))}
            self._budget.fixed_seconds += perf_counter() - began
            if not reached:
                return
            self._begin()
            # An optimizer that evaluates its closure again and again (LBFGS) trains on the first loss.
            if loss is not None and not (self._inside and self._inside_losses):
                self._pending.append((loss, reached))
            if loss is None:
                self._unseen = "backward() was not called on one scalar alone"
            for followed in self._followed:
                if followed.by_hand and followed.name in reached:
                    followed.untouched = followed.state()
            self._inside_losses += self._inside
        except Exception as error:
            self._run.guard.caught("taking the loss", error)

    def failed(self, kind: str, error: Exception) -> None:
        self._run.guard.caught(kind, error)

    def before_scaler_step(self, optimizer: Optimizer) -> Any:
        return self.optimizer_steps

    def after_scaler_step(self, optimizer: Optimizer, before: Any) -> None:
        with self._run.guard.shield("noting a skipped step"):
            name = self._optimizers.get(unwrap_optimizer(optimizer))
            if name is None or before != self.optimizer_steps:
                return
            # The scaler skipped the step because of non-finite gradients: its losses and tokens do not count.
            self.skipped += 1
            if self._light is not None and self._light.is_on:
                self._light.forget_losses()
            self._pending = [(loss, reached) for loss, reached in self._pending if name not in reached]
            if self._step is not None and not self._tokens_per_step:
                self._step.count_tokens(-self._step.tokens)
            if self.hasher is not None:
                self.hasher.forget()

    def _hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks before and after an optimizer's step. They do not keep the attachment alive."""
        reference = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (attachment := reference()) is not None:
                attachment._optimizer_begins(optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (attachment := reference()) is not None:
                attachment._optimizer_ended(optimizer)

        return before, after

    def _optimizer_begins(self, optimizer: Optimizer) -> None:
        if self._light is not None and self._light.is_on:
            # A step without a backward pass that could be seen.
            self._light.end()
        if self._due and (self._is_alone or optimizer in self._stepped):
            # A second step without a visible forward pass in between.
            self._close_if_due()
        self._begin(may_close=False)
        self._inside, self._inside_losses = True, 0

    def _optimizer_ended(self, optimizer: Optimizer) -> None:
        try:
            self._inside, self._inside_losses = False, 0
            self.optimizer_steps += 1
            if self._is_alone:
                self._use_losses(self._followed[0])
                self._due = True
            else:
                self._note_step_of(optimizer)
            if self._due and self._step is not None:
                self._step.stop_clock()
            # Guarantees that the previous step is on disk by now, even on a busy machine.
            if not self._budget.is_light:
                began = perf_counter()
                self._steps.pipeline.settle()
                self._budget.fixed_seconds += perf_counter() - began
            if self._budget.is_light and self._due and self._step is not None:
                self._enter_light(optimizer, self._step)
        except Exception as error:
            self._run.guard.caught("ending a step", error)
        if self._due and not self._forward_seen:
            # The model is called inside a compiled graph: no hook will report when the next step begins.
            self._close_if_due()

    def _note_step_of(self, optimizer: Optimizer) -> None:
        """Note that one of several optimizers stepped; a step is complete once all awaited ones have."""
        self._stepped.add(optimizer)
        for followed in self._followed:
            if followed.name == self._optimizers.get(optimizer):
                followed.steps += 1
                self._use_losses(followed)
        if max(followed.steps for followed in self._followed) > PATIENCE:
            self._wait_no_longer()
        self._due = self._awaited <= self._stepped

    def _note_updates_by_hand(self, last: bool = False) -> None:
        """Complete the step if a model without an optimizer was updated. `last`: assume that it was."""
        for followed in self._followed:
            if followed.untouched is None or not followed.by_hand:
                continue
            if last or followed.state() != followed.untouched:
                followed.untouched = None
                self._use_losses(followed)
                self._due = True
        if self._due and self._step is not None:
            self._step.stop_clock()

    def _wait_no_longer(self) -> None:
        for idle in self._awaited - self._stepped:
            self._awaited.discard(idle)
            self._run.guard.warn_once(
                "idle",
                "%s has not stepped in %d steps of another optimizer: steps no longer wait for it.",
                type(idle).__name__,
                PATIENCE,
            )

    # The step

    def _begin(self, may_close: bool = True) -> "Step | None":
        """Record the step if it is complete, and return the open step, beginning one if necessary."""
        if may_close and not self._inside:
            self._close_if_due()
        if self._step is None and not self._run.finished:
            if self._light is not None:
                self._light.close()
            self._steps_before = self.optimizer_steps
            try:
                self._step = self._run.step(self._tokens_per_step)
                self._step.__enter__()
            except Exception as error:
                self._run.guard.caught("beginning a step", error)
        return self._step

    def _close_if_due(self) -> None:
        step = self._step
        if step is None or not self._due:
            return
        self._step, self._due, self._forward_seen = None, False, False
        self._steps_once = self.optimizer_steps == self._steps_before + 1
        self._stepped.clear()
        try:
            self._log(step)
        except Exception as error:
            self._run.guard.caught("recording a step", error)
        # Outside of the `try`: an exception raised by an alert callback belongs to the script.
        step.__exit__(None, None, None)

    def _log(self, step: "Step") -> None:
        self._sees_values |= bool(step.scalars or step.device_scalars)
        for index, followed in enumerate(self._followed):
            self._most_steps = max(self._most_steps, followed.steps)
            losses, followed.losses, followed.steps = followed.losses, [], 0
            # Shielded per model: losses that cannot be combined must not affect other models or later steps.
            with self._run.guard.shield("combining the losses"):
                if losses:
                    value, followed.divisor = self._combined(losses, followed.divisor)
                    if index == 0:
                        step.log_default("loss", value)
                    if followed.name:
                        step.log_default(f"loss/{followed.name}", value)
                elif index == 0 and "loss" not in step:
                    self._ask_for_the_loss(step)
        self._unseen = ""
        self.log_skipped(step)

    def log_skipped(self, step: "Step") -> None:
        """Log how many steps a scaler has skipped since the last recorded one."""
        if self.skipped:
            step.log_default("skipped_steps", self.skipped)
            self.skipped = 0

    def _ask_for_the_loss(self, step: "Step") -> None:
        """Warn once that no loss was seen in a complete step."""
        self._run.guard.warn_once(
            "no loss",
            "step %d has no loss: %s. Log it yourself: call run.log(loss=loss) in each step, no later than "
            "right after optimizer.step().",
            step.number,
            self._unseen
            or "backward() of a scalar was not called (torch.autograd.grad does not show the loss)",
        )

    def _combined(self, losses: Sequence[Loss], learned: float) -> tuple[Tensor, float]:
        value, divisor = combine(losses, self._reduction, learned)
        return value, divisor if divisor != 1.0 else learned

    # Light steps

    def _enter_light(self, optimizer: Optimizer, step: "Step") -> None:
        """Take only the losses of the next steps, if nothing asks for more; see `LightSteps`."""
        steps, followed, first = self._steps, self._followed[0], step.number + 1
        until = self._budget.next_full(first)
        sampled = steps.collector.next_sampled(first)
        until = until if sampled is None else min(until, sampled)
        losses = followed.losses
        if (
            until - first < MIN_STEPS
            or not (self._is_alone and self._steps_once and steps.follower is self)
            or not (len(losses) == 1 and losses[0].value.is_cpu and followed.divisor == 1.0)
            or self.skipped
            or self.hasher is not None
            or (probe := followed.steady_probe()) is None
            or steps.collector.sampled
            or steps.collector.needs_each_step
            or (steps.flight is not None and steps.flight.needs_each_step)
            or not all(isinstance(handle, HookHandle) for handle in self._handles)
            or not is_sole(self)
        ):
            return
        if steps.collector.counts_always:
            # What the layers count from now on belongs to the step after the light ones.
            steps.take(step)
        if self._light is None:
            names = ["loss", f"loss/{followed.name}"] if followed.name else ["loss"]
            self._light = LightSteps(self, steps, optimizer, probe, names)
        models = {
            id(model): model
            for model in (*self._models, *steps.measures.models, followed.model())
            if model is not None
        }
        inner = [unwrapped(model) for model in models.values()]
        self._light.begin(
            {**models, **{id(model): model for model in inner}}.values(),
            until,
            full=self._forward_seen,
            tokens_per_step=self._tokens_per_step,
            count_tokens=token_count if self._counts_inputs and step.tokens > 0 else None,
            called=next(iter(self._models), None) if self._forward_seen else None,
            sees_calls=self._sees_values,
        )

    def _leave_light(self) -> None:
        if self._light is not None:
            self._light.close()
            if not self._light.is_in_hook:
                self._light.restore_step_hooks()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped while its hooks were removed."""
        self._optimizer_begins(optimizer)
        self._optimizer_ended(optimizer)

    def close_step(self) -> None:
        """Record the open step if its work is done."""
        self._close_if_due()

    def combined(self, losses: Sequence[float], divisor: float) -> float | None:
        """Combine the losses of a light step; `divisor` is what the last one was divided by."""
        if not losses:
            return None
        taken = [Loss(_on_host(value), divisor) for value in losses]
        return float(combine(taken, self._reduction, self._followed[0].divisor)[0])

    def take_over(self, losses: Sequence[float]) -> None:
        """Take the losses of the step that has begun as a light one."""
        name = self._followed[0].name
        self._pending += [(Loss(_on_host(value), 1.0), {name}) for value in losses]

    # Losses

    def _use_losses(self, followed: FollowedModel) -> None:
        """Assign the pending losses that reached this model to it, after a step of its optimizer."""
        used = [loss for loss, reached in self._pending if followed.name in reached]
        self._pending = [(loss, reached) for loss, reached in self._pending if followed.name not in reached]
        followed.losses += used

    def _forget_discarded(self, gradients: Mapping[str, Iterable[Any]]) -> None:
        """Drop losses whose gradients were discarded before any optimizer used them."""
        if not self._pending:
            return
        gone = {name for name, versions in gradients.items() if all(version is None for version in versions)}
        for _, reached in self._pending:
            reached -= gone
        self._pending = [(loss, reached) for loss, reached in self._pending if reached]


def _on_host(value: float) -> Tensor:
    """A number as a tensor of the host, whatever torch's default device is."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")
