"""What moved first, in kept steps."""

import numpy as np
import pytest

from fp8scope.postmortem.onset import moved_at, signs
from fp8scope.recording.records import Row

STATISTICS = ("numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite")


def noisy(length: int = 120, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.exp(np.random.default_rng(seed).normal(0.0, 0.1, length))


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_series_does_not_move(seed: int) -> None:
    assert moved_at(noisy(seed=seed)) is None


@pytest.mark.parametrize("factor", [10.0, 0.1, np.nan, np.inf])
def test_a_lasting_change_is_found_at_its_step(factor: float) -> None:
    values = noisy()
    values[70:] *= factor
    assert moved_at(values) == 70


def test_a_single_spike_and_a_short_series_do_not_move() -> None:
    values = noisy()
    values[70] *= 100
    assert moved_at(values) is None
    assert moved_at(np.array([1.0, 1.0, 100.0, 100.0])) is None


def test_a_rate_moves_when_it_rises() -> None:
    falling, rising = np.zeros(90), np.zeros(90)
    falling[:40] = 0.005
    rising[60:] = 0.3
    assert moved_at(falling, is_rate=True) is None
    assert moved_at(rising, is_rate=True) == 60


def test_signs_are_in_the_order_of_their_steps() -> None:
    rows = []
    for step in range(1, 91):
        statistics = np.zeros((2, 7))
        statistics[:, 0], statistics[:, 1] = 100, 1.0
        statistics[1, 3] = 50 if step >= 60 else 0
        rows.append(
            Row(
                step=step,
                time_us=0,
                dropped=0,
                scalars={"loss": 9.0 if step >= 70 else 2.0},
                statistics=statistics,
            )
        )
    found = signs(rows, ["a", "b"], STATISTICS)
    assert [(sign.step, sign.name) for sign in found] == [(60, "b saturated rate"), (70, "loss")]
    assert found[1].sentence() == "loss went from 2 to 9"
    # A tensor that appears late is described from its first step on.
    assert (
        signs([Row(step=1, time_us=0, dropped=0, scalars={}, statistics=np.zeros((0, 7)))], ["a"], STATISTICS)
        == []
    )
