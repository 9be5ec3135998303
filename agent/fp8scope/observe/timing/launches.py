"""The launch-bound time of a step: an accelerator has nothing left to do, and the host still launches.

The host asks, at the end of a phase, whether the device has finished everything so far. Where it has, the lag
of the device behind the host is zero; between two such moments the lag follows from both clocks:

    lag = max(0, lag before + time on the device - time on the host)

A phase is launch-bound if its lag at the end is at most `MAX_LAG` of its time on the device: the device has
kept up with the host, which therefore set the pace. Of the phase's time on the device, the lag counts as
work, and so do its interruptions. The rest is an upper limit of the time in which the device was idle.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_LAG: Final = 0.1


class PhaseInterval(NamedTuple):
    """Between two marks, in seconds: of the device's clock, of the host's, and of interruptions.

    `launches`: the phase launches the training's work. `is_idle`: at its end the device had nothing left to
    do; None if it does not say.
    """

    device: float
    host: float
    interrupted: float
    launches: bool
    is_idle: bool | None


class LaunchLag:
    """Follows the device's lag behind the host from step to step."""

    __slots__ = ("_lag",)

    def __init__(self) -> None:
        self._lag: float | None = None

    def forget(self) -> None:
        """Forget the lag: a step is missing between the last one and the next."""
        self._lag = None

    def seconds_of(self, intervals: Sequence[PhaseInterval]) -> float | None:
        """Return the launch-bound seconds of the next step's intervals; None if the device says nothing."""
        bound, is_answered = 0.0, False
        for interval in intervals:
            is_answered |= interval.is_idle is not None
            if interval.is_idle:
                self._lag = 0.0
            elif self._lag is not None:
                self._lag = max(0.0, self._lag + interval.device - interval.host)
            if interval.launches and self._lag is not None and self._lag <= MAX_LAG * interval.device:
                bound += max(0.0, interval.device - self._lag - interval.interrupted)
        return bound if is_answered else None
