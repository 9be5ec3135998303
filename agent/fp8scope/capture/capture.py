"""Records what a script gives to other trackers: values at the steps of the run, configuration, summary."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from fp8scope.capture.account import CaptureAccount
from fp8scope.capture.calls import CallReader, TrackerCall, without
from fp8scope.capture.descriptions import Descriptions
from fp8scope.capture.media import MediaCapture, Take
from fp8scope.capture.names import recorded_name
from fp8scope.capture.step_values import StepValues
from fp8scope.capture.values import Key, NotANumberError, count_of, number_of
from fp8scope.guard import before_any_run
from fp8scope.process.open_runs import live_runs
from fp8scope.process.threads import call_after_fork
from fp8scope.step import Step

if TYPE_CHECKING:
    from fp8scope.run import Run

MAX_WAITING = 20_000
"""Calls that are kept until a run begins, or the first of its steps."""
STEPS_WITHOUT_TRAINING = 3
"""A script that no training is found in begins its run after so many steps of a tracker."""
MAX_NAMES = 10_000
logger = logging.getLogger("fp8scope")


class ValueCapture:
    """Takes the calls of trackers, and records them in the run that it is bound to.

    The steps of the run are the axis. A value belongs to the step that is open when the script gives it; the
    tracker's own step is recorded beside it as `tracker_step/<tracker>`. Where the agent finds no steps,
    those of the first tracker that counts some are the steps of the run.

    Args:
        begin: Begins a run for a script without a training that could be found, or returns None if there is
            one. It is called while values wait; with True when no more can.
    """

    def __init__(self, begin: "Callable[[bool], Run | None] | None" = None) -> None:
        self._begin = begin
        self._run: Run | None = None
        self._lock = threading.RLock()
        self._reader = CallReader()
        self._descriptions = Descriptions()
        self._account = CaptureAccount()
        self._media = MediaCapture()
        self._names: dict[str, str] = {}
        """The names to record under, by those of the script."""
        self._follows = False
        """True if the agent finds the steps of the run."""
        self._waiting: list[TrackerCall] = []
        self._waiting_steps: set[int | None] = set()
        self._is_placing = False
        """True once values go to steps of the run: not before the first one."""
        self._values: StepValues | None = None
        """Those of the open step."""
        self._beside: StepValues | None = None
        """Those of a step without one that is open: they have rows of their own."""
        self._leader = ""
        """The tracker whose steps are those of the run."""
        self._is_closed = False
        call_after_fork(self._after_fork)

    # Called by the replaced functions of trackers

    def take(
        self,
        tracker: str,
        values: Mapping[Any, Any],
        step: Any = None,
        *,
        separator: str = "/",
        replaces: bool = False,
        counts: bool = False,
    ) -> None:
        """Record the numbers among `values`. Never raises.

        Args:
            step: the tracker's own step, if the call has one.
            separator: stands between the names of nested mappings, as in the tracker.
            replaces: a value of the same name and step replaces the earlier one in the tracker, too.
            counts: the step is always that of the values. In a tracker without it, a value that is given
                again without counting on begins another step of the run.
        """
        try:
            if self._is_closed or not isinstance(values, Mapping):
                return
            with self._lock:
                call, news = self._reader.read(
                    tracker, values, count_of(step), separator, replaces=replaces, counts=counts
                )
                if news:
                    self._account.say_what_is_left_out(tracker, news)
                if call.numbers:
                    self._add(call)
        except Exception as error:
            self.caught(f"capturing values of {tracker}", error)

    def take_media(self, tracker: str, make: Take) -> None:
        """Record the images, texts, tables or files that `make` yields, at the open step. Never raises."""
        try:
            with self._lock:
                if self._is_closed or (self._run is None and (live_runs or self._begin is None)):
                    return
                for media in make():
                    self._media.take(self._run, tracker, media)
        except Exception as error:
            self.caught(f"capturing media of {tracker}", error)

    @contextmanager
    def around(
        self, tracker: str, values: Mapping[Any, Any], step: Any = None, *, separator: str = "/"
    ) -> Iterator[None]:
        """Record, after the block, the values that trackers called within the block have not been given."""
        taken: Counter[Key] = Counter()
        try:
            with self._reader.collecting(taken):
                yield
        finally:
            try:
                left = without(values, taken, separator)
            except Exception as error:
                left = {}
                self.caught(f"capturing values of {tracker}", error)
            if left:
                self.take(tracker, left, step, separator=separator)

    def configure(self, tracker: str, config: Any) -> None:
        """Add to the run's configuration what the script gave as a tracker's. Never raises."""
        try:
            with self._lock:
                if not self._is_closed and isinstance(config, Mapping):
                    self._descriptions.configure(tracker, config, self._run)
        except Exception as error:
            self.caught(f"capturing the configuration of {tracker}", error)

    def summarise(self, tracker: str, summary: Any) -> None:
        """Add to the run's summary what the script gave as a tracker's. Never raises."""
        try:
            with self._lock:
                if not self._is_closed and isinstance(summary, Mapping):
                    self._descriptions.summarise(summary, self._run)
        except Exception as error:
            self.caught(f"capturing the summary of {tracker}", error)

    def note_step_metric(self, tracker: str, pattern: Any, metric: Any) -> None:
        """Note that a tracker shows values of a pattern by another value, and not by its steps."""
        with self._lock:
            self._descriptions.note_step_metric(tracker, str(pattern), str(metric))

    def has(self, tail: str, value: Any) -> bool:
        """Return whether a tracker gave this value in the open step, under a name that ends with `tail`."""
        try:
            number = number_of(value)
        except NotANumberError:
            return False
        with self._lock:
            values = self._values
            return (
                values is not None
                and self._run is not None
                and values.step is self._run.session.steps.open
                and values.has(tail, number)
            )

    def caught(self, kind: str, error: Exception) -> None:
        """Count an exception of the capture, and log the first of its kind."""
        if self._run is not None:
            self._run.guard.caught(kind, error)
        else:
            before_any_run(kind, error)

    # The run

    @property
    def run(self) -> "Run | None":
        """The run that values are recorded in."""
        return self._run

    @property
    def begins_runs(self) -> bool:
        """Return whether it goes on between runs, as in `fp8scope run`."""
        return self._begin is not None

    def bind(self, run: "Run") -> None:
        """Record in this run from now on, until it ends."""
        with self._lock:
            if self._run is run:
                return
            self._run, self._values, self._beside = run, None, None
            self._is_placing, self._leader, self._names, self._follows = False, "", {}, False
            run.session.steps.before_first.append(self._first_step_begins)
            run.session.before_end.append(lambda: self._run_ends(run))
            self._descriptions.hand_over(run)
            self._media.hand_over(run)

    def close(self) -> None:
        """Record what waits, and take nothing more."""
        try:
            with self._lock:
                if self._waiting and self._run is None and self._begin is not None and not live_runs:
                    self._bind_if(self._begin(True))
                self._place_waiting()
                self._is_closed = True
        except Exception as error:
            self.caught("capturing the last values", error)

    def _bind_if(self, run: "Run | None") -> None:
        if run is not None:
            self.bind(run)

    def _run_ends(self, run: "Run") -> None:
        with self._lock:
            if self._run is not run:
                return
            self._place_waiting(ended=True)
            registration = run.session.registration
            renamed = {raw: name for raw, name in self._names.items() if raw != name}
            if facts := self._account.facts(self._reader, self._descriptions.step_metrics, renamed):
                environment = {**registration.document["environment"], "capture": facts}
                registration.set("environment", environment)
                registration.send_changes(now=True)
            self._run = None

    # Calls

    def _add(self, call: TrackerCall) -> None:
        run = self._run
        if run is None:
            self._wait_for_run(call)
        elif run.session.steps.active and not (self._is_placing or self._place_waiting()):
            self._waiting.append(call)
        elif run.session.steps.active:
            self._place(run, call)

    def _wait_for_run(self, call: TrackerCall) -> None:
        if live_runs or self._begin is None:
            # The script records a run itself.
            self._waiting.clear()
            return
        self._waiting.append(call)
        self._waiting_steps.add(len(self._waiting) if call.count is None else call.count)
        is_full = len(self._waiting) >= MAX_WAITING
        if is_full or len(self._waiting_steps) >= STEPS_WITHOUT_TRAINING:
            self._bind_if(self._begin(is_full))
            if self._run is not None:
                self._place_waiting()
            elif is_full:
                self._waiting.clear()
                self._is_closed = True
                logger.warning(
                    "what the script gives to other trackers is not recorded: %d calls came, and no training "
                    "step.",
                    MAX_WAITING,
                )

    def _first_step_begins(self, number: int) -> None:
        """The run's first step begins: what the script gave before comes before it."""
        try:
            with self._lock:
                if not self._is_placing:
                    self._place_before(number)
        except Exception as error:
            self.caught("capturing the first values", error)

    def _place_waiting(self, *, ended: bool = False) -> bool:
        """Record the calls that wait, if the run has a step or trackers count them. Returns whether it is so.

        `ended`: the run makes no further step.
        """
        run = self._run
        if run is None:
            return False
        steps = run.session.steps
        if steps.are_logged and not ended:
            self._is_placing = True
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                self._place(run, call)
        elif steps.first is not None or ended or len(self._waiting) >= MAX_WAITING:
            self._place_before(steps.number + 1 if steps.first is None else steps.first)
        return self._is_placing

    def _place_before(self, first: int) -> None:
        """Record the calls that wait before step `first`: at step 0, or in a run that continues with it."""
        run = self._run
        if run is None:
            return
        self._is_placing = True
        self._follow()
        waiting, self._waiting = self._waiting, []
        if waiting:
            steps = run.session.steps
            number = first if first != 1 or run.attempt or steps.recorded is not None else 0
            values = StepValues(Step(steps, steps.number if steps.recorded is not None else number, 0))
            for call in waiting:
                self._record(run, values, call, apart=True)

    def _place(self, run: "Run", call: TrackerCall) -> None:
        steps = run.session.steps
        if steps.are_logged:
            step: Step | None = self._step_of_tracker(run, call)
        elif get_ident() == steps.thread:
            step = steps.step_for_values()
            self._follow()
        else:
            # The open step belongs to the thread that trains.
            step = None
        if step is not None:
            self._use(run, step)
        elif self._beside is None or self._beside.step.number != steps.current:
            number = steps.current if steps.first is not None else steps.number + 1
            self._beside = StepValues(Step(steps, number, 0))
        values = self._values if step is not None else self._beside
        if values is not None:
            self._record(run, values, call, apart=step is None)

    def _step_of_tracker(self, run: "Run", call: TrackerCall) -> Step | None:
        """Return the step of a run that only trackers count."""
        steps = run.session.steps
        step, count = steps.open, call.count
        if count is not None and count >= 0 and not self._leader:
            self._leader = call.tracker
        leads = call.tracker == (self._leader or call.tracker)
        if step is None:
            number = steps.number if steps.recorded is not None else steps.number + 1
            number = count if leads and count is not None and count >= 0 else number
            steps.log_at(number, {})
        elif leads and count is not None and count > step.number:
            steps.log_at(count, {})
        elif leads and not (call.replaces or call.counts) and self._repeats(call):
            steps.log_at(step.number + 1, {})
        return steps.open

    def _repeats(self, call: TrackerCall) -> bool:
        """Return whether a tracker gives a value again without counting on."""
        values = self._values
        if values is None or values.count_of(call.tracker) != call.count:
            return False
        names = values.names_of(call.tracker)
        return any(self._name(raw) in names for raw, _ in call.numbers)

    def _record(self, run: "Run", values: StepValues, call: TrackerCall, *, apart: bool = False) -> None:
        step = values.step
        names = {raw: self._name(raw) for raw, _ in call.numbers}
        for row in values.add(call, names, apart=apart):
            run.session.steps.put_values(step.number, call.time_us, row)
        if call.count is not None:
            self._account.note_steps(call.tracker, names.values(), step.number, call.count, self._leader)

    def _follow(self) -> None:
        """The agent finds the steps of the run, and measures them."""
        if not self._follows:
            self._follows, self._names = True, {}

    def _name(self, raw: str) -> str:
        name = self._names.get(raw)
        if name is None:
            name = recorded_name(raw, follows=self._follows)
            if len(self._names) < MAX_NAMES:
                self._names[raw] = name
        return name

    # Steps

    def _use(self, run: "Run", step: Step) -> None:
        if self._values is None or self._values.step is not step:
            self._values = StepValues(step)
        run.session.steps.at_end = self._step_ends

    def _step_ends(self, step: Step) -> None:
        """Record beside the step what `run.log` has replaced in it."""
        try:
            with self._lock:
                values = self._values
                if values is not None and values.step is step and self._run is not None:
                    self._values = None
                    for row in values.replaced():
                        self._run.session.steps.put_values(step.number, TrackerCall.now(), row)
        except Exception as error:
            self.caught("ending a step", error)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
