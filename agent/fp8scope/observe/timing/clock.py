"""Where a step's time goes: data wait, forward, backward, optimizer and the rest.

A clock is told when something begins or ends, and adds the time since it was last told to one phase. Phases
therefore add up to the time from the end of the step before to the end of this one.

On the CPU that is the host's clock. On a CUDA device the host only hands out work, so that there an event is
put into the stream instead. What lies between two events a background thread reads once they have passed.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PHASES = ("time_data", "time_forward", "time_backward", "time_optimizer", "time_other")
DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))

MAX_MARKS = 1024
"""Of one step on a device: beyond, hundreds of micro-batches, what follows counts as other."""


class HostClock:
    """Times by the host's clock."""

    def __init__(self) -> None:
        self._last = 0.0
        self._totals = [0.0] * len(PHASES)
        self._marks = 0

    def begin(self) -> None:
        """A step begins: the first one's time counts from here."""
        if not self._last:
            self._last = time.perf_counter()

    def mark(self, phase: int) -> None:
        """The time since the last mark belongs to `phase`."""
        now = time.perf_counter()
        if self._last:
            self._totals[phase] += now - self._last
            self._marks += 1
        self._last = now

    def end(self) -> "HostTimes | None":
        """A step ends; None when nothing was marked in it."""
        if not self._marks:
            self._last = time.perf_counter()
            return None
        self.mark(OTHER)
        totals, self._totals, self._marks = self._totals, [0.0] * len(PHASES), 0
        return HostTimes(totals)


class HostTimes:
    """A step's seconds, known already."""

    __slots__ = ("_totals",)

    def __init__(self, totals: Sequence[float]) -> None:
        self._totals = totals

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def read(self) -> dict[str, float]:
        """Seconds by the names of `PHASES`."""
        return dict(zip(PHASES, self._totals, strict=True))


class DeviceClock:
    """Times by events in the current stream of a CUDA device. Nothing here waits for it."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._first: torch.cuda.Event | None = None
        self._marks: list[tuple[int, torch.cuda.Event]] = []

    def begin(self) -> None:
        """A step begins: the first one's time counts from here."""
        if self._first is None:
            self._first = self._record()

    def mark(self, phase: int) -> None:
        """What the device does from the last mark up to here belongs to `phase`."""
        if self._first is not None and len(self._marks) < MAX_MARKS:
            event = self._record()
            if event is not None:
                self._marks.append((phase, event))

    def end(self) -> "DeviceTimes | None":
        """A step ends; None when nothing was marked in it."""
        marked = bool(self._marks)
        last = self._record()
        first, marks = self._first, self._marks
        self._first, self._marks = last, []
        if first is None or last is None or not marked:
            return None
        return DeviceTimes(first, [*marks, (OTHER, last)], self._free)

    def _record(self) -> "torch.cuda.Event | None":
        import torch

        if torch.cuda.is_current_stream_capturing():
            # An event inside of a graph cannot be read.
            return None
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class DeviceTimes:
    """A step's events, to be read once the last has passed."""

    __slots__ = ("_first", "_free", "_marks")

    def __init__(
        self,
        first: "torch.cuda.Event",
        marks: "Sequence[tuple[int, torch.cuda.Event]]",
        free: "list[torch.cuda.Event]",
    ) -> None:
        self._first = first
        self._marks = marks
        self._free = free

    def is_ready(self) -> bool:
        return bool(self._marks[-1][1].query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the device: not on the training thread."""
        self._marks[-1][1].synchronize()

    def read(self) -> dict[str, float]:
        """Seconds by the names of `PHASES`; the events go back to the clock."""
        totals = [0.0] * len(PHASES)
        previous = self._first
        for phase, event in self._marks:
            totals[phase] += previous.elapsed_time(event) / 1000
            # The last one is the first of the step after.
            self._free.append(previous)
            previous = event
        return dict(zip(PHASES, totals, strict=True))


Clock = HostClock | DeviceClock
Times = HostTimes | DeviceTimes
