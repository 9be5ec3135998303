"""When two losses of the same batches count as the same, and how even their difference is."""

import numpy as np
import pytest

from fp8scope.control.loss_comparison import compare


@pytest.mark.parametrize(
    ("fp8", "bf16", "delta", "within"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0, True),
        ([2.002, 2.004], [2.0, 2.0], 0.0015, True),
        ([2.01, 2.01], [2.0, 2.0], 0.005, False),
        ([1.99, 1.99], [2.0, 2.0], -0.005, False),
        ([-1.0, -1.0], [-2.0, -2.0], 0.5, False),
        ([float("nan"), 1.0], [1.0, 1.0], float("nan"), False),
        ([1.0, 1.0], [float("inf"), 1.0], float("nan"), False),
        ([0.0, 0.0], [0.0, 0.0], float("nan"), False),
    ],
    ids=str,
)
def test_it_works(fp8: list[float], bf16: list[float], delta: float, within: bool) -> None:
    verdict = compare(fp8, bf16, 0.0025)
    assert verdict.delta == pytest.approx(delta, nan_ok=True) and verdict.within is within


def test_noise_is_the_standard_error_of_the_paired_difference() -> None:
    generator = np.random.default_rng(0)
    level = generator.normal(2.0, 0.5, 50)
    difference = generator.normal(0.01, 0.02, 50)
    verdict = compare((level + difference).tolist(), level.tolist(), 0.0025)
    expected = difference.std(ddof=1) / np.sqrt(50) / level.mean()
    assert verdict.noise == pytest.approx(expected, rel=1e-9)
    assert verdict.delta == pytest.approx(difference.mean() / level.mean(), rel=1e-9)
