"""Steps so short that only their loss is taken; the agent's hooks are removed meanwhile.

`observe.budget` decides which steps are light. Between two others, models and the optimizer carry no hook of
ours but one behind `optimizer.step()`, and `torch.autograd.backward` looks at one parameter's gradient to
tell whether it trained the model. What is unusual (no loss, a loss on a device) ends the stretch; the steps
after it pass through `attachment`, as all others do.

In a short step each Python call costs several microseconds, as torch's code has displaced ours from the
caches. So there are few of them.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.autolog import loss_capture
from fp8scope.observe.tensors.base import inside_backward, is_traced
from fp8scope.recording.light_rows import LightRow, LightSource, clock_offset
from fp8scope.step import Step
from fp8scope_kernels.hooks import (
    HiddenHooks,
    HookHandle,
    register_forward_pre_hook,
    register_step_post_hook,
    tables_of,
)

if TYPE_CHECKING:
    from fp8scope.autolog.attachment import Attachment
    from fp8scope.session.steps import Steps

MIN_STEPS = 3
"""Shorter stretches are not worth the removal of hooks."""
Tokens = Callable[[Sequence[Any], dict[str, Any]], int]


class LightSteps:
    """One stretch of light steps after another, of one model that one optimizer trains.

    Args:
        parameter: A weak reference to the parameter whose gradient tells whether a backward pass trained the
            model.
        names: The names under which the loss is recorded.
    """

    def __init__(
        self,
        attachment: "Attachment",
        steps: "Steps",
        optimizer: Optimizer,
        parameter: "weakref.ref[Tensor]",
        names: Sequence[str],
    ) -> None:
        self.is_on = False
        """Whether the steps are taken here, and not by the attachment."""
        self.is_in_hook = False
        """Whether a hook of the optimizer is running: its table must not change."""
        self._attachment = attachment
        self._steps = steps
        self._optimizer = weakref.ref(optimizer)
        self._parameter = parameter
        self._names = names
        self._source: LightSource | None = None
        self._until = 0
        self._losses: list[float] = []
        self._divisor = 1.0
        self._tokens = self._tokens_per_step = 0
        self._due: LightRow | Step | _Full | None = None
        """The last step, open for values that the script logs after `optimizer.step()`."""
        self._stays_open = True
        self._times: list[float] = []
        self._sees_calls = False
        """Whether the script logs values: the calls of the model then show where a step begins."""
        self._hidden_calls: HiddenHooks | None = None
        self._hidden_steps: HiddenHooks | None = None
        self._handles: list[HookHandle] = []
        self._step_handle: HookHandle | None = None

    @property
    def removed_hooks(self) -> bool:
        """Return whether the optimizer's hooks are removed."""
        return self._hidden_steps is not None

    def begin(
        self,
        models: Iterable[nn.Module],
        until: int,
        *,
        full: bool,
        tokens_per_step: int,
        count_tokens: Tokens | None,
        called: nn.Module | None,
        sees_calls: bool,
    ) -> None:
        """The steps that follow are light, up to `until`. Called when the optimizer has stepped.

        Args:
            models: The modules that have hooks of ours in such steps.
            full: Whether the last step is still open in the attachment, and light steps stay open likewise.
            tokens_per_step: The tokens of each step, if `count_tokens` does not count them.
            count_tokens: Counts the tokens in the arguments of `called`.
            called: The module whose call begins a step.
            sees_calls: Whether the script logs values of its own.
        """
        steps = self._steps
        self._source = LightSource(
            names=self._names,
            guard=steps.guard,
            urgency=steps.urgency,
            keep=None if steps.flight is None else steps.flight.keep_row,
            clock_offset=clock_offset(),
        )
        self._until, self._tokens_per_step, self._times = until, tokens_per_step, []
        self.forget_losses()
        self._due, self._stays_open = _FULL if full else None, full
        self._hidden_calls = HiddenHooks(table for model in models for table in tables_of(model))
        self._sees_calls |= sees_calls
        if called is not None and (count_tokens is not None or self._sees_calls):
            hook = _CallHook(self, count_tokens)
            self._handles.append(register_forward_pre_hook(called, hook, prepend=True, with_kwargs=True))
        steps.collector.rest()
        steps.light = self
        loss_capture.take_light(self)
        self.is_on = True

    # Called in each light step

    def backward(self, original: Callable[..., Any], loss: Tensor, args: Any, kwargs: Any) -> Any:
        """Carry out a backward pass that begins at one tensor, and take its loss if it trained the model."""
        parameter, before, trained = self._parameter(), None, False
        try:
            if self._hidden_steps is None:
                self._remove_step_hooks()
            if parameter is not None and (gradient := parameter.grad) is not None:
                before = id(gradient), gradient._version
            elif self._losses:
                # Their gradients were discarded before the optimizer used them.
                self._losses.clear()
            if self._losses:
                self._divisor = loss_capture.divisor(loss)
        except Exception as error:
            self._on_error(error)
        result = original(loss, None, *args, **kwargs)
        try:
            if parameter is not None and (gradient := parameter.grad) is not None:
                trained = before is None or before != (id(gradient), gradient._version)
            if trained:
                # A list, so that what fails leaves it as it was.
                self._losses += [_number(loss)]
        except Exception as error:
            self._on_error(error)
        if trained and self._due is not None:
            self.hand_over()
        return result

    def step_ended(self) -> None:
        """The optimizer has stepped."""
        steps, attachment = self._steps, self._attachment
        if not self.is_on or not steps.active:
            # The stretch has ended, and no backward pass was seen since.
            optimizer = self._optimizer()
            if steps.active and optimizer is not None:
                attachment.optimizer_stepped(optimizer)
            return
        if self._due is not None:
            self.hand_over()
        attachment.optimizer_steps += 1
        ended, losses, number = perf_counter(), self._losses, steps.number + 1
        steps.number = number
        self._times.append(ended)
        loss = losses[0] if len(losses) == 1 else self._combined(losses)
        tokens = self._tokens or self._tokens_per_step
        self._due = LightRow(self._source, number, ended, loss, tokens)  # type: ignore[arg-type]
        self._losses, self._tokens = [], 0
        if steps.early or attachment.skipped:
            self._log_what_waits()
        if not self._stays_open:
            self.hand_over()
        if number + 1 >= self._until or len(losses) != 1:
            self.end()

    def called(self, tokens: int) -> None:
        """A training forward pass on so many tokens begins."""
        if self._due is not None:
            self.hand_over()
        self._tokens += tokens

    def forget_losses(self) -> None:
        """The gradients of the step that has begun are discarded."""
        self._losses, self._tokens, self._divisor = [], 0, 1.0

    def _combined(self, losses: Sequence[float]) -> float | None:
        try:
            return self._attachment.combined(losses, self._divisor)
        except Exception as error:
            self._on_error(error)
            return None

    # Values that the script logs

    def step_for_values(self) -> Step | None:
        """Return the step that values belong to which are logged now; None if that is the next."""
        self._sees_calls = True
        if self._losses and self._due is not None:
            self.hand_over()
        row = self._due
        if isinstance(row, LightRow):
            self._due = step = Step(self._steps, row.number, row.step_tokens)
            step.ended, step.ended_at = row.ended, row.ended_at
            step.log(row.scalars())
            self._steps.open = step
        return self._due if isinstance(self._due, Step) else None

    def _log_what_waits(self) -> None:
        """Give values that were logged before the step's end to the step."""
        early, self._steps.early = self._steps.early, {}
        step = self.step_for_values()
        if step is not None:
            step.log(early)
            self._attachment.log_skipped(step)

    # The end

    def hand_over(self) -> None:
        """Record the last step. Raises what the callbacks of alerts raise."""
        due, self._due = self._due, None
        if type(due) is LightRow:
            self._steps.end_light_step(due)
        elif isinstance(due, Step):
            self._steps.end_step(due, None)
        else:
            self._attachment.close_step()

    def end(self) -> None:
        """The next step is not light. The last one stays open until something follows it."""
        if not self.is_on:
            return
        self.is_on = False
        loss_capture.take_light(None)
        steps = self._steps
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._hidden_calls is not None:
            self._hidden_calls.restore()
            self._hidden_calls = None
        times, self._times = self._times, []
        steps.light_steps_ended(times)
        losses, self._losses = self._losses, []
        if losses:
            self._attachment.take_over(losses)

    def close(self) -> None:
        """End, and record the last step."""
        self.end()
        if self._due is not None:
            self.hand_over()
        if self._steps.light is self:
            self._steps.light = None

    def restore_step_hooks(self) -> None:
        """Return the hooks to the optimizer. Not to be called by one of them."""
        if self._step_handle is not None:
            self._step_handle.remove()
            self._step_handle = None
        if self._hidden_steps is not None:
            self._hidden_steps.restore()
            self._hidden_steps = None

    def _remove_step_hooks(self) -> None:
        """Remove the optimizer's hooks. Torch iterates over them in a step, so this is done before it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        tables: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        self._hidden_steps = HiddenHooks(tables)
        reference = weakref.ref(self)

        def ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (light := reference()) is not None:
                light.is_in_hook = True
                try:
                    light.step_ended()
                finally:
                    light.is_in_hook = False

        self._step_handle = register_step_post_hook(optimizer, ended)

    def _on_error(self, error: Exception) -> None:
        self._steps.guard.caught("taking the loss", error)
        self.end()


class _Full:
    """Stands for the step before the stretch, which the attachment has to record."""


_FULL: Final = _Full()


class _CallHook:
    """Tells the stretch that a training forward pass begins. Keeps neither of the two alive."""

    def __init__(self, light: LightSteps, count_tokens: Tokens | None) -> None:
        self._light = weakref.ref(light)
        self._count_tokens = count_tokens

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        light = self._light()
        if light is None or not light.is_on or not module.training or not torch.is_grad_enabled():
            return
        if not is_traced() and not inside_backward():
            light.called(self._count_tokens(args, kwargs) if self._count_tokens is not None else 0)


def _number(loss: Tensor) -> float:
    """Return the loss. Raises TypeError or ValueError if it is not one number on the host."""
    loss = loss_capture.unscaled(loss)
    if not loss.is_cpu:
        raise ValueError("the loss has moved to a device")
    number: Any = loss.tolist()
    while isinstance(number, list):
        (number,) = number
    return float(number)
