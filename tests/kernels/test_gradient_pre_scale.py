"""The pre-scale of gradients averaged in FP8: halved while the sum saturates, grown while nothing does."""

from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.gradient_parameters import parameters

from fp8scope_kernels.gradient_reduction import MAX_PRE_SCALE, Fp8GradientReducer


def job_pre_scale(
    rank: int, size: int, agree: bool, steps: int, start: float, growth: float
) -> dict[str, Any]:
    """Gradients that are all alike, or that cancel in pairs of ranks."""
    named = parameters([(200, 100)])
    reducer = Fp8GradientReducer(named, growth=growth)
    reducer.load_state_dict({**reducer.state_dict(), "pre_scale": torch.tensor([start])})
    pattern = torch.randn(200, 100, generator=torch.Generator().manual_seed(1))
    seen = []
    for _ in range(steps):
        named[0][1].grad = pattern.clone() if agree or rank % 2 == 0 else -pattern
        reducer.reduce()
        seen.append(reducer.pre_scale["p0"])
    return {"seen": seen, "grad": named[0][1].grad, "pattern": pattern}


@pytest.mark.parametrize("size", [2, 4])
def test_it_works(size: int) -> None:
    """It halves while the sum saturates."""
    for result in run_ranks(job_pre_scale, size, True, 8, 1.0, 2**0.01):
        # At u = 1/N the largest sum is just at the maximum; below that, nothing is.
        halvings = [2.0**-k for k in range(1, 8) if 2.0**-k >= 1 / (2 * size)]
        assert result["seen"] == halvings + [halvings[-1]] * (8 - len(halvings))
        # Once nothing saturates, what is left is the error of E4M3, also for the largest.
        error = (result["grad"] - result["pattern"]).abs() / result["pattern"].abs().clamp(min=1e-1)
        assert error.max() <= 2**-4


def test_the_pre_scale_grows_while_nothing_saturates() -> None:
    """Every ten steps, until a rank's own cast saturates; then it halves and waits for ten calm steps."""
    for result in run_ranks(job_pre_scale, 2, False, 42, 0.5, 2**0.5):
        # At 1.41 one element in 20,000 saturates in the cast, though the sums are all zero.
        levels = [0.5] * 9 + [2**-0.5] * 10 + [1.0] * 10 + [2**0.5] + [2**-0.5] * 10 + [1.0] * 2
        assert result["seen"] == pytest.approx(levels)
        assert torch.count_nonzero(result["grad"]) == 0


def test_by_default_it_doubles_in_a_thousand_steps() -> None:
    named = parameters([(4,)])
    reducer = Fp8GradientReducer(named)
    for _ in range(1000):
        named[0][1].grad = torch.zeros(4)
        reducer.reduce()
    assert reducer.pre_scale["p0"] == pytest.approx(2.0, rel=1e-4)


def test_a_share_below_the_threshold_does_not_halve() -> None:
    """One value of 20,000 beyond the maximum is 5e-5."""
    for threshold, halved in ((4e-5, True), (6e-5, False)):
        named = parameters([(200, 100)])
        reducer = Fp8GradientReducer(named, threshold=threshold)
        named[0][1].grad = torch.full((200, 100), 0.5)
        named[0][1].grad[3, 4] = -1.0
        reducer.reduce()
        assert reducer.pre_scale["p0"] == (0.5 if halved else 1.0)


def test_the_pre_scale_of_zeros_is_bounded() -> None:
    named = parameters([(4,)])
    reducer = Fp8GradientReducer(named, growth=2.0, interval=1)
    for _ in range(12):
        named[0][1].grad = torch.zeros(4)
        reducer.reduce()
    assert reducer.pre_scale["p0"] == MAX_PRE_SCALE
