"""A run's steps: how one begins, is measured, ends and is handed to the recorder.

Everything here runs on the training thread in every step, with cold caches, where each call and each object
that is touched costs time. So there are few of them, and rare work is checked for before it is called.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol

from fp8scope.delivery.inbox import AlertQueue
from fp8scope.guard import Guard
from fp8scope.observe.budget import MEASURED_EVERY, PLAIN_EVERY, TimeBudget
from fp8scope.observe.collector import Collector
from fp8scope.observe.snapshot import BusyError, PlainSnapshot, Snapshot
from fp8scope.observe.timing import Measures
from fp8scope.observe.traces import StepTraces
from fp8scope.process.failure_report import failure
from fp8scope.process.sys_exit import exit_status
from fp8scope.recording.entries import StepRow, catalogue_of, histograms_of
from fp8scope.recording.light_rows import LightRow
from fp8scope.recording.records import Bytes
from fp8scope.recording.registration import Registration
from fp8scope.recording.urgency import Urgency
from fp8scope.scalars import is_tensor, whole_number
from fp8scope.session.pipeline import Pipeline
from fp8scope.step import MAX_SCALARS, Step

UNNOTICED_ROWS = 16
"""So many rows of light steps may wait before the queue's bounds are looked at."""
FULL_QUEUE = "the disk is slower than the training, and the queue is full"


class Follower(Protocol):
    """Finds the steps of a training loop by itself: `fp8scope.autolog.attachment.Attachment`."""

    @property
    def is_complete(self) -> bool:
        """Return whether the work of the open step is done, or no step is open."""

    def complete(self) -> None:
        """Record the open step if its work is done; else forget it."""

    def end(self) -> None:
        """Record the step that is complete, and follow the training no longer."""


class Light(Protocol):
    """Takes the steps of which only the loss is taken: `fp8scope.autolog.light_steps.LightSteps`."""

    is_on: bool

    def step_for_values(self) -> Step | None:
        """Return the step that values belong to which are logged now; None if that is the next."""


class FlightLog(Protocol):
    """Keeps the last steps: `fp8scope.incidents.flight_recorder.FlightRecorder`."""

    @property
    def needs_each_step(self) -> bool:
        """Return whether `step_ends` must be called for each step."""

    def step_ends(self, number: int, *, is_light: bool = False) -> None:
        """A step is being recorded; `is_light`: of which only the loss is taken."""

    def keep_row(self, pieces: Sequence[Bytes]) -> None:
        """Keep the row of a step. Called by the thread that records it."""


class Steps:
    """Makes, measures and records the steps of one run."""

    def __init__(
        self,
        guard: Guard,
        registration: Registration,
        pipeline: Pipeline,
        alerts: AlertQueue,
        *,
        overhead: float | None,
        device_file: Path | None = None,
        enabled: bool,
        on_rewind: Callable[[], None],
    ) -> None:
        self.guard = guard
        self.active = enabled
        """Whether anything is being recorded: not in a disabled or finished run, nor in a suspended one."""
        self.suspended = False
        self.number = 0
        """The step that was begun last, or that the run continues from."""
        self.tokens = 0
        """Tokens of all recorded steps."""
        self.recorded: int | None = None
        """The step that was recorded last by the current writer's attempt."""
        self.first: int | None = None
        """The first step that was begun."""
        self.before_first: list[Callable[[int], None]] = []
        """Called with the number of the first step, when it begins."""
        self.at_end: Callable[[Step], None] | None = None
        """Called once, with the next step that ends, before that is recorded."""
        self.thread = get_ident()
        """The thread that trains."""
        self.failure = ""
        """How the run has failed, as text. A step that ends well clears it."""
        self.budget = TimeBudget(overhead)
        self.collector = Collector(guard.caught, self.budget)
        self.measures = Measures(guard, self.budget, device_file)
        self.known_names: set[str] = set()
        self.open: Step | None = None
        self.early: dict[str, Any] = {}
        """Values that were logged before the first step; they go to that."""
        self.follower: Follower | None = None
        self.flight: FlightLog | None = None
        self.traces: StepTraces | None = None
        self.light: Light | None = None
        """Takes light steps, once there have been some."""
        self.urgency = Urgency()
        self.pipeline = pipeline
        """The current writer's."""
        self.switches: Sequence[object] = ()
        """Changes of layers' precision that wait for the next step; see `connect`."""
        self._switch_layers: Callable[[], None]
        self._at_boundary: Callable[[], None]
        self._registration = registration
        self._alerts = alerts.waiting
        self._deliver_alerts = alerts.deliver
        self._on_rewind = on_rewind
        self._enabled = enabled
        self._has_blocks = False
        """Whether steps are made by `Run.step` or a follower, not by `Run.log(step=...)`."""
        self._logged: Step | None = None
        """The step that `log_at` made last; it is open until the next one begins."""
        self._logged_at = perf_counter()

    def connect(
        self, switches: Sequence[object], switch_layers: Callable[[], None], at_boundary: Callable[[], None]
    ) -> None:
        """Set what happens between steps: `switch_layers` whenever `switches` holds something, `at_boundary`
        after each step.
        """
        self.switches, self._switch_layers, self._at_boundary = switches, switch_layers, at_boundary

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Record nothing within the block; afterwards the open step is as it was before."""
        before = self.number, self.open
        self.suspended, self.active = True, False
        try:
            yield
        finally:
            self.suspended, self.active = False, self._enabled
            if not self._enabled:
                # Another thread called `end_recording` after `_enabled` was read above.
                self.active = False
            self.number, self.open = before

    @property
    def _has_no_steps(self) -> bool:
        """Return whether nothing has shown yet how this script makes steps."""
        return self.recorded is None and not self._has_blocks and self.follower is None and self.active

    @property
    def completed(self) -> int:
        """The number of the last step whose work is done, whether it is recorded yet or not."""
        done = self.open is None or self.open is self._logged
        if self.follower is not None:
            done = self.follower.is_complete
        return self.number if done else self.number - 1

    def end_recording(self) -> None:
        """The run is finished: record no further step."""
        self._enabled = self.active = False
        if self.traces is not None:
            self.traces.abandon()

    def note_failure(self, error: BaseException) -> None:
        """Remember that the program failed with `error`. `sys.exit(0)` is not a failure."""
        with self.guard.shield("noting a failure"):
            if isinstance(error, SystemExit) and exit_status(error.code) == 0:
                return
            self.failure = failure("".join(traceback.format_exception(error)))

    # A step's life

    def begin_step(self, step: Step, *, logged: bool = False) -> None:
        """A step begins; `logged`: it was made by `log_at`."""
        if self._logged is not None:
            self.end_logged()
        if self.first is None:
            self.first = step.number
            for action in self.before_first:
                action(step.number)
        if logged:
            self._logged = step
        else:
            self._has_blocks = True
        if self.switches:
            self._switch_layers()
        if self.traces is not None:
            self.traces.begins(step.number)
        self.measures.begin()
        self.open = step
        if self.early:
            early, self.early = self.early, {}
            self.log(early)

    def measure_step(self, step: Step) -> None:
        """The work of the step is done: read the clock, and what the optimizers say."""
        if self.measures.watching and self.active:
            self.pipeline.lag = self.budget.lag
            if self.budget.is_light:
                if self.budget.plan(step.number + 1):
                    self.measures.restart()
                return
            began = perf_counter()
            try:
                step.reading = self.measures.end(step)
                self.budget.plan(step.number + 1)
                if self._registration.lacks_precision and self.measures.precision:
                    self._registration.set("precision", self.measures.precision)
            except Exception as error:
                self.guard.caught("measuring a step", error)
            self.budget.fixed_seconds += perf_counter() - began

    def end_light_step(self, row: LightRow) -> None:
        """A step of which only the loss was taken has ended: record it, then do what waits for that."""
        if not self.active:
            return
        number, before, pipeline = row.number, self.recorded, self.pipeline
        self.recorded = number
        try:
            if before is not None and number < before:
                self._on_rewind()
                pipeline = self.pipeline
            if self._registration.pending:
                self._registration.send_changes()
            if row.step_tokens:
                self.tokens += row.step_tokens
                row.tokens = self.tokens
            if len(pipeline.waiting) > UNNOTICED_ROWS and pipeline.is_full(self.collector.row_bytes):
                self.guard.drop(1, FULL_QUEUE)
            else:
                pipeline.put(row)
        except Exception as error:
            self.guard.caught("collecting a step", error)
        self.failure = ""
        if self._alerts:
            self._deliver_alerts()
        self._at_boundary()

    def light_steps_ended(self, times: Sequence[float]) -> None:
        """The next step is not light; the light ones have ended at `times` (`time.perf_counter`)."""
        try:
            self.budget.note_light(times)
            self.pipeline.lag = self.budget.lag
            self.budget.plan(self.number + 1)
            self.measures.restart()
        except Exception as error:
            self.guard.caught("measuring a step", error)

    def abandon_step(self) -> None:
        """Forget the open step, which will not be completed."""
        if self.open is not None:
            self.number = self.open.number - 1
            self.open = None
            self.collector.discard()
            if self.traces is not None:
                self.traces.abandon()

    def end_step(self, step: Step, error: BaseException | None) -> None:
        """The step's block was left: record it, then do what waits for a step's end."""
        if self.open is step:
            self.open = None
        if self.traces is not None:
            self.traces.ends(step.number)
        if self.at_end is not None:
            at_end, self.at_end = self.at_end, None
            at_end(step)
        if self.active:
            began = perf_counter()
            try:
                self._collect(step)
            except Exception as ours:
                self.guard.caught("collecting a step", ours)
            self.budget.fixed_seconds += perf_counter() - began
        if error is not None:
            self.note_failure(error)
            return
        # Training went on, so the script has dealt with whatever an earlier step raised.
        self.failure = ""
        if self._alerts:
            self._deliver_alerts()
        self._at_boundary()

    def _collect(self, step: Step) -> None:
        number, before = step.number, self.recorded
        self.recorded, self.thread = number, get_ident()
        if before is not None and number < before:
            self._on_rewind()
        if self._registration.pending:
            self._registration.send_changes()
        self.tokens += step.tokens
        collector, pipeline = self.collector, self.pipeline
        if (grown := collector.new_tensors()) is not None:
            pipeline.put(catalogue_of(*grown))
        if pipeline.waiting and pipeline.is_full(collector.row_bytes):
            collector.discard()
            self.guard.drop(1, FULL_QUEUE)
            return
        if self.budget.was_thinned:
            step.log_default(PLAIN_EVERY, float(self.budget.every))
        if self.budget.is_short and step.reading is not None:
            step.log_default(MEASURED_EVERY, float(self.budget.measured_every))
        try:
            snapshot = step.taken if step.is_taken else self._snapshot(step)
        except BusyError as busy:
            self.guard.drop(1, str(busy))
            return
        flight = self.flight
        keep = None if flight is None else flight.keep_row
        pipeline.put(
            StepRow(
                step=step,
                tokens=self.tokens,
                snapshot=snapshot,
                guard=self.guard,
                keep=keep,
                urgency=self.urgency,
            )
        )
        if flight is not None:
            flight.step_ends(number, is_light=self.budget.is_short and step.reading is None)
        if snapshot is not None and snapshot.sampled:
            pipeline.put(histograms_of(step, snapshot))
            self.count_kernel_failures()

    def take(self, step: Step) -> None:
        """Take the statistics of the step now: what is counted after it belongs to a later one."""
        try:
            step.take(self._snapshot(step))
        except BusyError as busy:
            step.take(None)
            self.guard.caught("watching a step", busy)

    def _snapshot(self, step: Step) -> "Snapshot | PlainSnapshot | None":
        """The step's statistics and device scalars, on their way to the host."""
        reading, on_device = step.reading, step.device_scalars
        if reading is not None and reading.device:
            on_device = {**reading.device, **on_device}
        return self.collector.snapshot(on_device)

    def count_kernel_failures(self) -> None:
        """Count kernels that fell back to eager torch. They know of no run and only warn."""
        module: Any = sys.modules.get("fp8scope_kernels.backends")
        for why in module.failures() if module is not None else ():
            if self.guard.is_first(f"kernels {why}"):
                self.guard.error("an FP8 kernel", why.splitlines()[0][:500])

    # Logging outside of a step's block, and steps that the script makes by `run.log(..., step=number)`

    def step_for_values(self) -> Step | None:
        """Return the step that values belong to which are logged now; None if that is the next."""
        if self.open is None and self.light is not None:
            self.light.step_for_values()
        return self.open

    @property
    def current(self) -> int:
        """The number of the step that the training is in, or has made last."""
        return self.number + (self.open is None and self.light is not None and self.light.is_on)

    @property
    def are_logged(self) -> bool:
        """Return whether steps come from `log_at` alone: nothing finds or marks them."""
        return self.follower is None and not self._has_blocks

    def put_values(self, number: int, ended_at: int, values: Mapping[str, Any]) -> None:
        """Record values of step `number` in a row of their own, beside what the step itself has.

        `ended_at`: when they were logged, in microseconds since 1970. Any thread may call it.
        """
        step = Step(self, number, 0)
        step.log(values)
        step.ended_at = ended_at
        snapshot = self.collector.copies(step.device_scalars)
        if step.scalars or snapshot is not None:
            self.pipeline.put(StepRow(step=step, tokens=0, snapshot=snapshot, guard=self.guard))

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values to the open step; without one, to the next."""
        self.step_for_values()
        if self.open is None:
            if self._has_no_steps and not self.early.keys().isdisjoint(values):
                self.guard.warn_once(
                    "no steps",
                    "run.log: there is no step that values could be recorded with, and the last ones replace "
                    "those before. Use `with run.step()`, run.log(..., step=number) or fp8scope.attach.",
                )
            if len(self.early) < MAX_SCALARS:
                self.early |= values
            return
        if "tokens" in values:
            with self.guard.shield("logging 'tokens'"):
                tokens = values["tokens"]
                if is_tensor(tokens) and tokens.device.type != "cpu":
                    raise TypeError("tokens must be a plain number: reading one would wait for the device")
                self.open.tokens = int(tokens)
            values = {name: value for name, value in values.items() if name != "tokens"}
        self.open.log(values)

    def log_at(self, number: int, values: Mapping[str, Any]) -> None:
        """Add values to step `number`, which is made here if the script makes no steps in another way."""
        number = whole_number(number)
        step = self.open
        if step is not None and step is not self._logged:
            if number not in (step.number, step.number - 1):
                self.guard.warn_once(
                    "other step",
                    "run.log(step=%d) while step %d is open: the values are recorded with that one.",
                    number,
                    step.number,
                )
            self.log(values)
        elif self._has_blocks or self.follower is not None:
            if self.recorded is not None and number <= self.recorded:
                self.guard.warn_once(
                    "late step",
                    "run.log(step=%d): that step is recorded already, and the values go to the next one. Log "
                    "them before its block ends.",
                    number,
                )
            self.log(values)
        elif step is not None and number == step.number:
            self.log(values)
        elif number <= self.number and (step is not None or self.recorded is not None):
            late = f"run.log(step={number}) after step {self.number}: the values are not recorded"
            self.guard.caught(
                "logging to an earlier step",
                ValueError(f"{late}; log a step's values before those of the next"),
            )
        else:
            self.end_logged()
            self._begin_logged(number, values)

    def _begin_logged(self, number: int, values: Mapping[str, Any]) -> None:
        """Make a step whose work is done already.

        What was counted since the previous step belongs to it; its values may come in several calls.
        """
        step = Step(self, number, 0)
        self.number = number
        self.begin_step(step, logged=True)
        step.stop_clock(self._logged_at)
        self._logged_at = step.ended
        self.log(values)
        step.take(self._snapshot(step))
        self.collector.begin(number + 1)

    def end_logged(self) -> None:
        """Record the step that `log_at` made last."""
        step, self._logged = self._logged, None
        if step is not None:
            with self.guard.shield("reading values from a device"):
                step.read_late_scalars()
            step.__exit__(None, None, None)
