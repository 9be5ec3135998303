"""Measures the scalars of each step: times, gradient norm, learning rates, FLOP/s and memory."""

import math
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from fp8scope.guard import Guard
from fp8scope.observe.budget import TimeBudget
from fp8scope.observe.timing.clock import DATA, Times
from fp8scope.observe.timing.low_precision import LowPrecisionState
from fp8scope.observe.timing.machine import Machine
from fp8scope.observe.timing.peaks import bf16_peak
from fp8scope.scalars import host_number, is_tensor

if TYPE_CHECKING:
    import torch

    from fp8scope.observe.timing.torch_hooks import ModelHooks, OptimizerHooks, Stopwatch


class StepMeasurements:
    """The measurements of one step. `device`: scalars that are still on a device."""

    __slots__ = ("_flops", "_machine", "_recomputed", "_scalars", "_times", "device", "peak")

    def __init__(
        self,
        *,
        scalars: "dict[str, Any]",
        device: "dict[str, torch.Tensor]",
        times: Times | None,
        flops: float,
        recomputed: float,
        peak: float | None,
        machine: Machine,
    ) -> None:
        self._scalars = scalars
        self.device = device
        self._times = times
        self._flops = flops
        self._recomputed = recomputed
        self.peak = peak
        self._machine = machine

    def is_ready(self) -> bool:
        """Return whether `read` returns without waiting."""
        return self._times is None or self._times.is_ready()

    def wait(self) -> None:
        """Wait for the device; not for the training thread."""
        if self._times is not None:
            self._times.wait()

    def read(self) -> dict[str, float]:
        """Return the scalars by name, without those in `device`; call it after `wait`."""
        scalars: dict[str, float] = {**self._scalars, **self._machine.take()}
        if self._times is None:
            return scalars
        times = self._times.read()
        scalars |= times
        scalars |= self._times.anatomy()
        seconds = sum(times.values())
        if self._flops > 0 and seconds > 0:
            rates = {"model_flops_per_second": self._flops / seconds}
            if not math.isnan(self._recomputed):
                rates["hardware_flops_per_second"] = (self._flops + self._recomputed) / seconds
            scalars |= rates
            if self.peak:
                utilisations = zip(("mfu", "hfu"), rates.values(), strict=False)
                scalars |= {name: rate / self.peak for name, rate in utilisations}
        return scalars


class Measures:
    """Measures the watched models and optimizers; `begin` and `end` enclose a step."""

    def __init__(
        self, guard: Guard, budget: TimeBudget | None = None, device_file: Path | None = None
    ) -> None:
        self._guard = guard
        self._device_file = device_file
        self._budget = budget or TimeBudget(None)
        self._watch: Stopwatch | None = None
        self._models: WeakKeyDictionary[torch.nn.Module, ModelHooks] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, OptimizerHooks] = WeakKeyDictionary()
        self._stepping: list[OptimizerHooks] = []
        """The optimizers' hooks as a list, which is ten times faster to iterate than the weak dictionary."""
        self._state = LowPrecisionState()
        self._groups = 0
        self._begun = False
        """Whether the clock and the sampling of the machine run; they start with the first step."""
        self._looks_for_parts = False
        """Whether the first step of a model has not ended yet."""
        self._machine = Machine(guard, self._accelerator, device_file)
        self._peaks: dict[Any, float | None] = {}

    @property
    def watching(self) -> bool:
        return self._watch is not None

    @property
    def precision(self) -> str:
        """The precision of the model's products in its first training pass; empty if it is not known."""
        return self._watch.precision if self._watch is not None else ""

    def watch(self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None) -> None:
        """Measure these from the next step on. Watching them twice has no effect."""
        from fp8scope.observe.timing.gradients import inner_optimizer
        from fp8scope.observe.timing.torch_hooks import ModelHooks, OptimizerHooks, Stopwatch

        if self._watch is None:
            self._watch, self._begun = Stopwatch(self._guard, self._budget), False
        if model not in self._models:
            self._models[model] = ModelHooks(model, self._watch)
            self._looks_for_parts = True
        optimizer = inner_optimizer(optimizer) if optimizer is not None else None
        if optimizer is not None and optimizer not in self._optimizers:
            hooks = OptimizerHooks(optimizer, self._watch, self._groups)
            self._optimizers[optimizer] = hooks
            self._stepping.append(hooks)
            self._groups += len(optimizer.param_groups)

    def _watch_parts(self) -> None:
        """Measure the parts of models that the first step did not call: their methods call the parts."""
        from fp8scope.observe.timing.torch_hooks import ModelHooks

        assert self._watch is not None
        for model, hooks in list(self._models.items()):
            for part in () if hooks.was_called else _callable_parts(model):
                if part not in self._models:
                    self._models[part] = ModelHooks(part, self._watch)

    def facts(self) -> dict[str, Any]:
        """Return what the training is made of, for advice; empty if nothing was measured."""
        if self._watch is None or not self._watch.facts.steps:
            return {}
        from fp8scope.observe.memory_account import memory_account

        facts = self._watch.facts.document(self._watch.device)
        with self._guard.shield("adding up the memory"):
            facts["memory_account"] = memory_account(self._models, self._optimizers)
        return facts

    @property
    def models(self) -> "tuple[torch.nn.Module, ...]":
        """The modules whose calls are measured."""
        return tuple(self._models)

    def begin(self) -> None:
        """Called when a step begins."""
        if not self._begun and self._watch is not None:
            from fp8scope.observe.timing.interruptions import listen_to_collectives

            self._begun = True
            listen_to_collectives()
            self._watch.clock.begin()
            self._machine.start()

    def restart(self) -> None:
        """Called between two steps: the time that has passed belongs to none that is measured."""
        if self._watch is not None:
            self._watch.end_of_step()
            self._watch.clock.restart()
            self._watch.idle = DATA
            for hooks in self._stepping:
                hooks.end_of_step()

    def mark(self, phase: int) -> None:
        """The time since the last mark belongs to `phase` of `observe.timing.clock`: said by somebody who
        knows when the model is not called as one, and hooks therefore do not.
        """
        if self._watch is not None:
            parameter = next((p for model in self._models for p in model.parameters()), None)
            if self._watch.device is None and parameter is not None:
                self._watch.place(parameter.device)
            self._watch.clock.mark(phase)

    def end(self, logged: Container[str]) -> StepMeasurements | None:
        """End the step, in which the script has `logged` these names. Returns None if nothing is watched."""
        watch = self._watch
        if watch is None:
            return None
        if self._looks_for_parts:
            self._looks_for_parts = False
            self._watch_parts()
        times = watch.clock.end()
        flops, recomputed = watch.end_of_step()
        scalars: dict[str, Any] = {}
        device: dict[str, torch.Tensor] = {}
        if self._stepping:
            self._ask_optimizers(scalars, logged)
        with self._guard.shield("measuring state in few bits"):
            scalars |= self._state.scalars(self._models, self._optimizers)
        for name, value in tuple(scalars.items()):
            if is_tensor(value) and value.device.type != "cpu":
                device[name] = scalars.pop(name)
            else:
                scalars[name] = host_number(value)
        return StepMeasurements(
            scalars=scalars,
            device=device,
            times=times,
            flops=flops,
            recomputed=recomputed,
            peak=self._peak() if flops else None,
            machine=self._machine,
        )

    def _ask_optimizers(self, scalars: dict[str, Any], logged: Container[str]) -> None:
        norm = self._norm()
        if norm is not None:
            scalars["grad_norm_applied" if norm[0] in logged else norm[0]] = norm[1]
        for hooks in self._stepping:
            scalars |= hooks.rates
            hooks.end_of_step()

    def _norm(self) -> "tuple[str, torch.Tensor | float] | None":
        """Return the norm of all gradients that the optimizers used in the step, by the scalar's name."""
        norms = [hooks.norm for hooks in self._stepping if hooks.norm is not None]
        if not norms:
            return None
        total = norms[0][0] if len(norms) == 1 else _together([norm for norm, _ in norms])
        return "grad_norm_local" if any(sharded for _, sharded in norms) else "grad_norm", total

    def _accelerator(self) -> "torch.device | None":
        """Return the accelerator that the model is on; None without a model, and on a CPU."""
        device = self._watch.device if self._watch is not None else None
        return None if device is None or device.type in ("cpu", "meta") else device

    def _peak(self) -> float | None:
        device = self._accelerator()
        if device not in self._peaks:
            from fp8scope_kernels import devices

            self._peaks[device] = bf16_peak(devices.name_of(device)) if device is not None else None
        return self._peaks[device]

    def after_fork(self, guard: Guard) -> None:
        """Called in a forked child, which has its own guard and no sampling thread."""
        self._guard = guard
        if self._watch is not None:
            self._watch.guard = guard
            # Workers of a loader are forked, too: only a thread that calls the model is timed.
            self._watch.thread = 0
        self._machine, self._begun = Machine(self._guard, self._accelerator, self._device_file), False

    def close(self) -> None:
        """Remove all hooks, and end the thread."""
        hooks: tuple[ModelHooks | OptimizerHooks, ...] = (*self._models.values(), *self._stepping)
        for hook in hooks:
            hook.remove()
        self._stepping.clear()
        self._models.clear()
        self._optimizers.clear()
        if self._watch is not None:
            self._watch.close()
        self._watch = None
        self._machine.stop()


def _callable_parts(model: "torch.nn.Module") -> "Iterator[torch.nn.Module]":
    """Yield the outermost modules in a model that can be called; a ModuleList and others like it cannot."""
    from torch import nn

    for part in model.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _callable_parts(part)
        else:
            yield part


def _together(norms: "Sequence[torch.Tensor | float]") -> "torch.Tensor | float":
    """Combine the norms of parts into one norm, on the device of the first one that is on a device."""
    tensors = [norm for norm in norms if is_tensor(norm)]
    if not tensors:
        return math.hypot(*cast("Sequence[float]", norms))
    import torch

    device = tensors[0].device
    parts = [torch.as_tensor(norm, dtype=torch.float32).to(device, non_blocking=True) for norm in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return total
