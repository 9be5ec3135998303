"""The parts of a step's time: data wait, forward, backward, optimizer and the rest.

Each mark adds the time since the previous mark to one phase. The phases of a step therefore add up to the
time from the end of the previous step to the end of this one.

On the CPU a mark reads the host's clock. On an accelerator, where the host only launches work, it records an
event in the stream; a background thread reads the times between the events later. An accelerator without
events is measured with the host's clock. The host's clock is read beside each event, for the time in which
the device waits for the host (`observe.timing.launches`).

What interrupts a phase (`enter`, `leave`: a wait for the loader, a copy, a collective, a checkpoint) still
belongs to that phase. It is a part of its own in the step's anatomy, which divides the same time further.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fp8scope.observe.timing import anatomy
from fp8scope.observe.timing.anatomy import PartTimes
from fp8scope.observe.timing.launches import LaunchLag, PhaseInterval

if TYPE_CHECKING:
    import torch

    from fp8scope_kernels.devices import Event

PHASES = ("time_data", "time_forward", "time_backward", "time_optimizer", "time_other")
DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))
LOSS: Final = len(PHASES)
"""Counts as `OTHER`, and is a part of its own in the anatomy."""

_PARTS: Final = (
    anatomy.DATA_PART,
    anatomy.FORWARD_PART,
    anatomy.BACKWARD_PART,
    anatomy.OPTIMIZER_PART,
    anatomy.REST,
    anatomy.LOSS_PART,
)
"""The part of the anatomy that each phase is, but for its interruptions."""
_ENTER: Final = -1
_LAUNCHING: Final = frozenset((FORWARD, BACKWARD, OPTIMIZER, LOSS))
LAUNCH_BOUND: Final = "launch_bound_seconds"

MAX_MARKS = 1024
"""Marks of one step on a device; later ones (after hundreds of micro-batches) count as other."""
MAX_INTERRUPTIONS = 256
"""Interruptions of one step on a device that are measured; later ones count as the phase that they are in."""


class ClockMark(NamedTuple):
    """The end of a phase or the begin or end of an interruption (`code`), on the device and on the host.

    `is_idle`: whether the device had finished all work before it; None if it does not say.
    """

    code: int
    event: "Event"
    host: float = 0.0
    is_idle: bool | None = None


class HostClock:
    """Measures with the host's clock."""

    def __init__(self) -> None:
        self._last = 0.0
        self._entered = 0.0
        self._totals = [0.0] * len(PHASES)
        self._parts = PartTimes()
        self._occurred: set[int] = set()
        self._marks = 0

    def begin(self) -> None:
        """Called when a step begins; the time of the first step starts here."""
        if not self._last:
            self._last = time.perf_counter()

    def restart(self) -> None:
        """Forget what was marked; the time of the next step starts here."""
        self._last, self._totals, self._marks = time.perf_counter(), [0.0] * len(PHASES), 0
        self._parts, self._entered = PartTimes(), 0.0

    def mark(self, phase: int) -> None:
        """Add the time since the last mark to `phase`."""
        now = time.perf_counter()
        if self._last:
            self._totals[OTHER if phase == LOSS else phase] += now - self._last
            self._parts.interval(_PARTS[phase], now - self._last)
            self._marks += 1
        self._last = now

    def enter(self) -> None:
        """An interruption begins. They do not nest."""
        self._entered = time.perf_counter()

    def leave(self, part: int) -> None:
        """The interruption ends, and was this part of the anatomy."""
        entered, self._entered = max(self._entered, self._last), 0.0
        if self._last:
            self._parts.interruption(part, time.perf_counter() - entered)

    def end(self) -> "HostTimes | None":
        """End the step; returns its times, or None if nothing was marked."""
        if not self._marks:
            self._last, self._parts = time.perf_counter(), PartTimes()
            return None
        self.mark(OTHER)
        totals, self._totals, self._marks = self._totals, [0.0] * len(PHASES), 0
        parts, self._parts = self._parts, PartTimes()
        return HostTimes(totals, parts, self._occurred)


class HostTimes:
    """The times of a step, known at once."""

    __slots__ = ("_occurred", "_parts", "_totals")

    def __init__(self, totals: Sequence[float], parts: PartTimes, occurred: set[int]) -> None:
        self._totals = totals
        self._parts = parts
        self._occurred = occurred

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def read(self) -> dict[str, float]:
        """Return the seconds by the names of `PHASES`."""
        return dict(zip(PHASES, self._totals, strict=True))

    def anatomy(self) -> dict[str, float]:
        """Return the scalars of the step's anatomy; call it after `read`."""
        return anatomy.scalars_of(self._parts.seconds, self._occurred)


class DeviceClock:
    """Measures with events in the current stream of an accelerator, without waiting for it."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._free: list[Event] = []
        self._first: ClockMark | None = None
        self._marks: list[ClockMark] = []
        self._interruptions = 0
        self._is_inside = False
        self._occurred: set[int] = set()
        self._lag = LaunchLag()
        self._is_chained = False
        """Whether the step begins where the last one that is read ended."""

    def begin(self) -> None:
        """Called when a step begins; the time of the first step starts here."""
        if self._first is None:
            self._first = self._mark(OTHER)

    def restart(self) -> None:
        """Forget what was marked; the time of the next step starts here."""
        self._first, self._marks, self._interruptions, self._is_inside = self._mark(OTHER), [], 0, False
        self._is_chained = False

    def mark(self, phase: int) -> None:
        """Add the device's work since the last mark to `phase`."""
        if self._first is not None and len(self._marks) - 2 * self._interruptions < MAX_MARKS:
            mark = self._mark(phase)
            if mark is not None:
                self._marks.append(mark)

    def enter(self) -> None:
        """An interruption begins. They do not nest."""
        if self._first is None or self._interruptions == MAX_INTERRUPTIONS:
            return
        mark = self._mark(_ENTER)
        if mark is not None:
            self._interruptions += 1
            self._is_inside = True
            self._marks.append(mark)

    def leave(self, part: int) -> None:
        """The interruption ends, and was this part of the anatomy."""
        if not self._is_inside:
            return
        self._is_inside = False
        mark = self._mark(_ENTER - 1 - part)
        if mark is not None:
            self._marks.append(mark)

    def end(self) -> "DeviceTimes | None":
        """End the step; returns its times, or None if nothing was marked."""
        marked = len(self._marks) > 2 * self._interruptions
        last = self._mark(OTHER)
        first, marks = self._first, self._marks
        self._first, self._marks, self._interruptions, self._is_inside = last, [], 0, False
        is_chained, self._is_chained = self._is_chained, False
        if first is None or last is None or not marked:
            return None
        self._is_chained = True
        return DeviceTimes(
            [first, *marks, last],
            free=self._free,
            occurred=self._occurred,
            lag=self._lag,
            is_chained=is_chained,
        )

    def _mark(self, code: int) -> ClockMark | None:
        """Record an event; None where the device cannot."""
        from fp8scope_kernels import devices

        if devices.is_capturing(self._device):
            # An event in a captured graph cannot be read.
            return None
        # The event is work, too: the question comes first.
        is_idle = devices.has_finished(self._device) if code > _ENTER else None
        event = self._free.pop() if self._free else devices.new_event(self._device, timing=True)
        if event is None:
            return None
        devices.record(event, self._device)
        return ClockMark(code, event, time.perf_counter(), is_idle)


class DeviceTimes:
    """The events of a step; readable once the last one has completed.

    `marks` begins with the end of the step before. `lag` is that of all steps, which are read in their order.
    """

    __slots__ = ("_free", "_is_chained", "_lag", "_launch_bound", "_marks", "_occurred", "_parts")

    def __init__(
        self,
        marks: Sequence[ClockMark],
        *,
        free: "list[Event]",
        occurred: set[int],
        lag: LaunchLag,
        is_chained: bool,
    ) -> None:
        self._marks = marks
        self._free = free
        self._occurred = occurred
        self._lag = lag
        self._is_chained = is_chained
        self._launch_bound: float | None = None
        self._parts = PartTimes()

    def is_ready(self) -> bool:
        return bool(self._marks[-1].event.query())

    def wait(self) -> None:
        """Wait for the device; not for the training thread."""
        self._marks[-1].event.synchronize()

    def read(self) -> dict[str, float]:
        """Return the seconds by the names of `PHASES`, and the events to the clock."""
        totals = [0.0] * len(PHASES)
        before, now, phase_began, entered = self._marks[0].event, 0.0, 0.0, 0.0
        host, interrupted, is_inside = self._marks[0].host, 0.0, False
        intervals = []
        for mark in self._marks[1:]:
            code = mark.code
            now += before.elapsed_time(mark.event) / 1000
            # The last event is the first one of the next step, so it is not freed.
            self._free.append(before)
            before = mark.event
            if code == _ENTER:
                entered, is_inside = now, True
            elif code < _ENTER:
                if is_inside:
                    self._parts.interruption(_ENTER - 1 - code, now - entered)
                    interrupted += now - entered
                is_inside = False
            else:
                totals[OTHER if code == LOSS else code] += now - phase_began
                self._parts.interval(_PARTS[code], now - phase_began)
                launches = code in _LAUNCHING
                intervals.append(
                    PhaseInterval(now - phase_began, mark.host - host, interrupted, launches, mark.is_idle)
                )
                phase_began = entered = now
                host, interrupted = mark.host, 0.0
        if not self._is_chained:
            self._lag.forget()
        self._launch_bound = self._lag.seconds_of(intervals)
        return dict(zip(PHASES, totals, strict=True))

    def anatomy(self) -> dict[str, float]:
        """Return the scalars of the step's anatomy; call it after `read`."""
        scalars = anatomy.scalars_of(self._parts.seconds, self._occurred)
        if self._launch_bound is not None:
            scalars[LAUNCH_BOUND] = self._launch_bound
        return scalars


Clock = HostClock | DeviceClock
Times = HostTimes | DeviceTimes
