"""A run's steps: how one begins, is measured, ends and is handed to the recorder.

What is here runs on the training thread, in every step, when the caches are full of other things: each call
and each object that is touched costs. So it is written with few of them, and what is rarely needed is asked
for before it is called.
"""

import abc
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any

from fp8scope.config import Settings
from fp8scope.delivery.alert import Alert
from fp8scope.metadata.git import RepositoryLookup
from fp8scope.observe.budget import PLAIN_EVERY, Budget
from fp8scope.observe.collector import Collector, whole_number
from fp8scope.observe.snapshot import BusyError, PlainSnapshot, Snapshot
from fp8scope.observe.timing import Measures
from fp8scope.recording.step_entries import StepRow, catalogue_of, histograms_of
from fp8scope.session.resume import Identity
from fp8scope.session.writers import Lifecycle
from fp8scope.step import Step


class Stepping(Lifecycle):
    """What `Run` is made of beside its life and what the training script calls."""

    _quiet: bool
    """Nothing that happens now is to be recorded."""
    _attachment: Any
    """Finds the steps by itself, if there is one."""
    _switches: list[Any]
    """Layers whose precision is to be changed."""

    def __init__(
        self, settings: Settings, registration: Mapping[str, Any], identity: Identity, *, rank: int
    ) -> None:
        super().__init__(settings, registration, identity, rank=rank)
        self._budget = Budget(settings.overhead)
        self._collector = Collector(self.guard.caught, self._budget)
        self._measures = Measures(self.guard, self._budget)
        self._known_names: set[str] = set()
        self._open: Step | None = None
        self._early: dict[str, Any] = {}
        self._alerts: deque[Alert] = deque(maxlen=1000)
        self._callbacks: list[Callable[[Alert], object]] = []
        self._repository: RepositoryLookup | None = None
        self._has_blocks = False
        """Whether steps are made by `step` or an attachment, not by `log`."""
        self._logged: Step | None = None
        """The step that `log(step=...)` has made last; it is open until another begins."""
        self._logged_at = perf_counter()

    def _active(self) -> bool:
        return self._report is None and not self._quiet and self._settings.mode != "disabled"

    # A step's life

    def _begin_step(self, step: Step, *, logged: bool = False) -> None:
        if self._logged is not None:
            self._end_logged()
        if logged:
            self._logged = step
        else:
            self._has_blocks = True
        if self._switches:
            self._switch_layers()
        self._measures.begin()
        self._open = step
        if self._early:
            early, self._early = self._early, {}
            self.log(early)

    def _measure_step(self, step: Step) -> None:
        if self._measures.watching and self._active():
            began = perf_counter()
            try:
                step._reading = self._measures.end(step)
            except Exception as error:
                self.guard.caught("measuring a step", error)
            self._budget.fixed_seconds += perf_counter() - began

    def _abandon_step(self) -> None:
        """Forget the step that is open: it will not be completed."""
        if self._open is not None:
            self._step = self._open.number - 1
            self._open = None
            self._collector.discard()

    def _end_step(self, step: Step, error: BaseException | None) -> None:
        if self._open is step:
            self._open = None
        if self._active():
            began = perf_counter()
            try:
                self._collect(step)
            except Exception as ours:
                self.guard.caught("collecting a step", ours)
            self._budget.fixed_seconds += perf_counter() - began
        if error is not None:
            self._note_failure(error)
            return
        # The training went on: what an earlier step raised was dealt with.
        self._failure = ""
        if self._alerts:
            self._deliver_alerts()
        self._boundary()

    def _collect(self, step: Step) -> None:
        number, before = step.number, self._recorded_step
        self._recorded_step, self._thread = number, get_ident()
        if before is not None and number < before:
            self._went_back()
        if self._repository is not None:
            self._complete_environment()
        if self._changed:
            self._describe_if_due()
        self._tokens += step._tokens
        collector, pipeline = self._collector, self._pipeline
        if (grown := collector.new_tensors()) is not None:
            pipeline.put(catalogue_of(*grown))
        if pipeline.waiting and pipeline.is_full(collector.row_bytes):
            collector.discard()
            self.guard.drop(1, "the disk is slower than the training, and the queue is full")
            return
        if self._budget.was_thinned:
            step.log_default(PLAIN_EVERY, float(self._budget.every))
        try:
            snapshot = step._taken if step._is_taken else self._snapshot(step)
        except BusyError as busy:
            self.guard.drop(1, str(busy))
            return
        pipeline.put(StepRow(step, self._tokens, snapshot, self.guard))
        if snapshot is not None and snapshot.sampled:
            pipeline.put(histograms_of(step, snapshot))
            self._count_kernel_failures()

    def _count_kernel_failures(self) -> None:
        """The kernels know of no run: they go on in eager torch, and say in a warning why."""
        module: Any = sys.modules.get("fp8scope_kernels.backends")
        for why in module.failures() if module is not None else ():
            if self.guard.is_first(f"kernels {why}"):
                self.guard.error("an FP8 kernel", why.splitlines()[0][:500])

    def _snapshot(self, step: Step) -> "Snapshot | PlainSnapshot | None":
        """What was counted in the step, on its way to the host with the values that are on a device."""
        reading, on_device = step._reading, step._device_scalars
        if reading is not None and reading.device:
            on_device = {**reading.device, **on_device}
        return self._collector.snapshot(on_device)

    # Steps that the script makes by `run.log(..., step=number)`

    def _log_at(self, number: int, values: Mapping[str, Any]) -> None:
        """Add values to the step `number`, which `log` makes where the script has no steps otherwise."""
        number = whole_number(number)
        step = self._open
        if step is not None and step is not self._logged:
            if number not in (step.number, step.number - 1):
                self.guard.tell_once(
                    "other step",
                    "run.log(step=%d) while step %d is open: the values are recorded with that one.",
                    number,
                    step.number,
                )
            self.log(values)
        elif self._has_blocks or self._attachment is not None:
            if self._recorded_step is not None and number <= self._recorded_step:
                self.guard.tell_once(
                    "late step",
                    "run.log(step=%d): that step is recorded already, and the values go to the next one. Log "
                    "them before its block ends.",
                    number,
                )
            self.log(values)
        elif step is not None and number == step.number:
            self.log(values)
        elif number <= self._step and (step is not None or self._recorded_step is not None):
            self.guard.error(
                "logging to an earlier step",
                f"run.log(step={number}) after step {self._step}: the values are not recorded; log a step's "
                "values before those of the next",
            )
        else:
            self._end_logged()
            self._begin_logged(number, values)

    def _begin_logged(self, number: int, values: Mapping[str, Any]) -> None:
        """A step that is over already: what was counted since the one before belongs to it, and its values
        may come in several calls.
        """
        step = Step(self, number, 0)  # type: ignore[arg-type]
        self._step = number
        self._begin_step(step, logged=True)
        step.stop_clock(self._logged_at)
        self._logged_at = step._ended
        self.log(values)
        step.take(self._snapshot(step))
        self._collector.begin(number + 1)

    def _end_logged(self) -> None:
        step, self._logged = self._logged, None
        if step is not None:
            with self.guard.shield("reading values from a device"):
                step.keep_taken()
            step.__exit__(None, None, None)

    def _settle(self) -> None:
        """Have the steps that were ended before in the spool, as far as a budget allows."""
        self._pipeline.settle()

    # What a run adds

    @abc.abstractmethod
    def log(self, scalars: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add values to the step that is open."""

    @abc.abstractmethod
    def _switch_layers(self) -> None:
        """Change the precision of the layers for which that was asked."""

    @abc.abstractmethod
    def _boundary(self) -> None:
        """Between two steps: do what waits for this moment."""

    # What comes to a run from elsewhere, and is used between two steps

    def _take_alerts(self, found: Sequence[Mapping[str, Any]]) -> None:
        for one in found:
            self._alerts.append(Alert.from_answer(one))

    def _deliver_alerts(self) -> None:
        while self._alerts and self._callbacks:
            alert = self._alerts.popleft()
            for callback in self._callbacks:
                callback(alert)

    def look_up_repository(self) -> None:
        """Have git asked for the commit and the changes since, and told once that is known."""
        if self._active():
            self._repository = RepositoryLookup()

    def _complete_environment(self, seconds: float = 0.0) -> None:
        """Add what git has answered to the registration; wait for it `seconds` at most."""
        found = self._repository.take(seconds) if self._repository is not None else None
        if self._repository is not None and found is not None:
            if self._repository.failure is not None:
                self.guard.caught("looking at the repository", self._repository.failure)
            self._repository = None
            if found:
                self._registration["environment"] = {**self._registration["environment"], **found}
                self._register()

    def after_fork_in_child(self) -> None:
        """Become another writer of the same run; it starts when the child records something."""
        super().after_fork_in_child()
        self._collector.on_error = self.guard.caught
        self._measures.after_fork(self.guard)
