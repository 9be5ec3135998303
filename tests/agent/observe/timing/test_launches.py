"""The launch-bound time: what the device's lag behind the host says of who sets the pace."""

import pytest

from fp8scope.observe.timing.launches import MAX_LAG, LaunchLag, PhaseInterval


def interval(
    device: float, host: float, *, idle: bool | None = False, launches: bool = True, interrupted: float = 0.0
) -> PhaseInterval:
    return PhaseInterval(device, host, interrupted, launches, idle)


def test_it_works() -> None:
    """A device that keeps up waits for the host; one that is behind does not."""
    lag = LaunchLag()
    assert lag.seconds_of([interval(2.0, 2.0, idle=True)]) == 2.0
    # The host has launched 5 s of work in 1 s.
    assert lag.seconds_of([interval(5.0, 1.0)]) == 0.0
    # It waits for the device, which is idle at the end: nothing of that second was a wait for the host.
    assert lag.seconds_of([interval(1.0, 5.0, launches=False, idle=True)]) == 0.0
    assert lag.seconds_of([interval(1.0, 1.0, idle=True)]) == 1.0


def test_a_device_that_says_nothing_has_no_launch_bound_time() -> None:
    assert LaunchLag().seconds_of([interval(1.0, 1.0, idle=None)]) is None


def test_the_lag_is_not_known_before_the_device_was_idle() -> None:
    lag = LaunchLag()
    assert lag.seconds_of([interval(1.0, 1.0), interval(1.0, 1.0, idle=True)]) == 1.0
    lag.forget()
    assert lag.seconds_of([interval(1.0, 1.0)]) == 0.0


def test_a_small_lag_and_interruptions_are_work() -> None:
    """The last kernel of a phase runs while the next phase is launched."""
    lag = LaunchLag()
    bound = lag.seconds_of(
        [interval(1.0, 1.0, idle=True), interval(1.05, 1.0), interval(2.0, 2.0, interrupted=0.5)]
    )
    assert bound == pytest.approx(1.0 + (1.05 - 0.05) + (2.0 - 0.05 - 0.5))
    # Beyond it, the device sets the pace.
    assert lag.seconds_of([interval(1.0, 0.95 - 1.1 * MAX_LAG)]) == 0.0
    # It catches up again, and never leads.
    assert lag.seconds_of([interval(1.0, 9.0), interval(1.0, 1.0)]) == pytest.approx(2.0)
