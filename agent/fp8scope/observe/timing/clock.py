"""The parts of a step's time: data wait, forward, backward, optimizer and the rest.

Each mark adds the time since the previous mark to one phase. The phases of a step therefore add up to the
time from the end of the previous step to the end of this one.

On the CPU a mark reads the host's clock. On an accelerator, where the host only launches work, it records an
event in the stream; a background thread reads the times between the events later. An accelerator without
events is measured with the host's clock.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fp8scope_kernels.devices import Event

PHASES = ("time_data", "time_forward", "time_backward", "time_optimizer", "time_other")
DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))

MAX_MARKS = 1024
"""Marks of one step on a device; later ones (after hundreds of micro-batches) count as other."""


class HostClock:
    """Measures with the host's clock."""

    def __init__(self) -> None:
        self._last = 0.0
        self._totals = [0.0] * len(PHASES)
        self._marks = 0

    def begin(self) -> None:
        """Called when a step begins; the time of the first step starts here."""
        if not self._last:
            self._last = time.perf_counter()

    def restart(self) -> None:
        """Forget what was marked; the time of the next step starts here."""
        self._last, self._totals, self._marks = time.perf_counter(), [0.0] * len(PHASES), 0

    def mark(self, phase: int) -> None:
        """Add the time since the last mark to `phase`."""
        now = time.perf_counter()
        if self._last:
            self._totals[phase] += now - self._last
            self._marks += 1
        self._last = now

    def end(self) -> "HostTimes | None":
        """End the step; returns its times, or None if nothing was marked."""
        if not self._marks:
            self._last = time.perf_counter()
            return None
        self.mark(OTHER)
        totals, self._totals, self._marks = self._totals, [0.0] * len(PHASES), 0
        return HostTimes(totals)


class HostTimes:
    """The times of a step, known at once."""

    __slots__ = ("_totals",)

    def __init__(self, totals: Sequence[float]) -> None:
        self._totals = totals

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def read(self) -> dict[str, float]:
        """Return the seconds by the names of `PHASES`."""
        return dict(zip(PHASES, self._totals, strict=True))


class DeviceClock:
    """Measures with events in the current stream of an accelerator, without waiting for it."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._free: list[Event] = []
        self._first: Event | None = None
        self._marks: list[tuple[int, Event]] = []

    def begin(self) -> None:
        """Called when a step begins; the time of the first step starts here."""
        if self._first is None:
            self._first = self._record()

    def restart(self) -> None:
        """Forget what was marked; the time of the next step starts here."""
        self._first, self._marks = self._record(), []

    def mark(self, phase: int) -> None:
        """Add the device's work since the last mark to `phase`."""
        if self._first is not None and len(self._marks) < MAX_MARKS:
            event = self._record()
            if event is not None:
                self._marks.append((phase, event))

    def end(self) -> "DeviceTimes | None":
        """End the step; returns its times, or None if nothing was marked."""
        marked = bool(self._marks)
        last = self._record()
        first, marks = self._first, self._marks
        self._first, self._marks = last, []
        if first is None or last is None or not marked:
            return None
        return DeviceTimes(first, [*marks, (OTHER, last)], self._free)

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

    __slots__ = ("_first", "_free", "_marks")

    def __init__(
        self,
        first: "Event",
        marks: "Sequence[tuple[int, Event]]",
        free: "list[Event]",
    ) -> None:
        self._first = first
        self._marks = marks
        self._free = free

    def is_ready(self) -> bool:
        return bool(self._marks[-1][1].query())

    def wait(self) -> None:
        """Wait for the device; not for the training thread."""
        self._marks[-1][1].synchronize()

    def read(self) -> dict[str, float]:
        """Return the seconds by the names of `PHASES`, and the events to the clock."""
        totals = [0.0] * len(PHASES)
        previous = self._first
        for phase, event in self._marks:
            totals[phase] += previous.elapsed_time(event) / 1000
            # The last event is the first one of the next step, so it is not freed.
            self._free.append(previous)
            previous = event
        return dict(zip(PHASES, totals, strict=True))


Clock = HostClock | DeviceClock
Times = HostTimes | DeviceTimes
