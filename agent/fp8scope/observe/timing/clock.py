"""The parts of a step's time: data wait, forward, backward, optimizer and the rest.

Each mark adds the time since the previous mark to one phase. The phases of a step therefore add up to the
time from the end of the previous step to the end of this one.

On the CPU a mark reads the host's clock. On an accelerator, where the host only launches work, it records an
event in the stream; a background thread reads the times between the events later. An accelerator without
events is measured with the host's clock.

What interrupts a phase (`enter`, `leave`: a wait for the loader, a copy, a collective, a checkpoint) still
belongs to that phase. It is a part of its own in the step's anatomy, which divides the same time further.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from fp8scope.observe.timing import anatomy
from fp8scope.observe.timing.anatomy import PartTimes

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

MAX_MARKS = 1024
"""Marks of one step on a device; later ones (after hundreds of micro-batches) count as other."""
MAX_INTERRUPTIONS = 256
"""Interruptions of one step on a device that are measured; later ones count as the phase that they are in."""


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
        self._first: Event | None = None
        self._marks: list[tuple[int, Event]] = []
        self._interruptions = 0
        self._is_inside = False
        self._occurred: set[int] = set()

    def begin(self) -> None:
        """Called when a step begins; the time of the first step starts here."""
        if self._first is None:
            self._first = self._record()

    def restart(self) -> None:
        """Forget what was marked; the time of the next step starts here."""
        self._first, self._marks, self._interruptions, self._is_inside = self._record(), [], 0, False

    def mark(self, phase: int) -> None:
        """Add the device's work since the last mark to `phase`."""
        if self._first is not None and len(self._marks) - 2 * self._interruptions < MAX_MARKS:
            event = self._record()
            if event is not None:
                self._marks.append((phase, event))

    def enter(self) -> None:
        """An interruption begins. They do not nest."""
        if self._first is None or self._interruptions == MAX_INTERRUPTIONS:
            return
        event = self._record()
        if event is not None:
            self._interruptions += 1
            self._is_inside = True
            self._marks.append((_ENTER, event))

    def leave(self, part: int) -> None:
        """The interruption ends, and was this part of the anatomy."""
        if not self._is_inside:
            return
        self._is_inside = False
        event = self._record()
        if event is not None:
            self._marks.append((_ENTER - 1 - part, event))

    def end(self) -> "DeviceTimes | None":
        """End the step; returns its times, or None if nothing was marked."""
        marked = len(self._marks) > 2 * self._interruptions
        last = self._record()
        first, marks = self._first, self._marks
        self._first, self._marks, self._interruptions, self._is_inside = last, [], 0, False
        if first is None or last is None or not marked:
            return None
        return DeviceTimes(first, [*marks, (OTHER, last)], self._free, self._occurred)

    def _record(self) -> "Event | None":
        from fp8scope_kernels import devices

        if devices.is_capturing(self._device):
            # An event in a captured graph cannot be read.
            return None
        event = self._free.pop() if self._free else devices.new_event(self._device, timing=True)
        if event is not None:
            devices.record(event, self._device)
        return event


class DeviceTimes:
    """The events of a step; readable once the last one has completed."""

    __slots__ = ("_first", "_free", "_marks", "_occurred", "_parts")

    def __init__(
        self,
        first: "Event",
        marks: "Sequence[tuple[int, Event]]",
        free: "list[Event]",
        occurred: set[int],
    ) -> None:
        self._first = first
        self._marks = marks
        self._free = free
        self._occurred = occurred
        self._parts = PartTimes()

    def is_ready(self) -> bool:
        return bool(self._marks[-1][1].query())

    def wait(self) -> None:
        """Wait for the device; not for the training thread."""
        self._marks[-1][1].synchronize()

    def read(self) -> dict[str, float]:
        """Return the seconds by the names of `PHASES`, and the events to the clock."""
        totals = [0.0] * len(PHASES)
        before, now, phase_began, entered = self._first, 0.0, 0.0, 0.0
        is_inside = False
        for code, event in self._marks:
            now += before.elapsed_time(event) / 1000
            # The last event is the first one of the next step, so it is not freed.
            self._free.append(before)
            before = event
            if code == _ENTER:
                entered, is_inside = now, True
            elif code < _ENTER:
                if is_inside:
                    self._parts.interruption(_ENTER - 1 - code, now - entered)
                is_inside = False
            else:
                totals[OTHER if code == LOSS else code] += now - phase_began
                self._parts.interval(_PARTS[code], now - phase_began)
                phase_began = entered = now
        return dict(zip(PHASES, totals, strict=True))

    def anatomy(self) -> dict[str, float]:
        """Return the scalars of the step's anatomy; call it after `read`."""
        return anatomy.scalars_of(self._parts.seconds, self._occurred)


Clock = HostClock | DeviceClock
Times = HostTimes | DeviceTimes
