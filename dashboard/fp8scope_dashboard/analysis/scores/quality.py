"""The sensitivity of an evaluation: its smallest effect, the items for a wanted effect, signal and noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import scipy

from fp8scope_dashboard.analysis.scores.intervals import POWER

# Fewer checkpoints show no trend.
CHECKPOINTS = 3
MAX_ITEMS = 10_000_000


def items_needed(
    effect: float,
    between: float,
    within: tuple[float, float] = (0.0, 0.0),
    samples: tuple[int, int] = (1, 1),
    *,
    alpha: float = 0.05,
    power: float = POWER,
) -> int:
    """Number of items for a two-sided paired test to find a difference (Miller, 2024, 'Adding Error Bars to
    Evals', arXiv:2411.00640, section 5).

    n = (z_{1 - alpha/2} + z_power)^2 (omega^2 + sigma_A^2 / K_A + sigma_B^2 / K_B) / effect^2

    Args:
        between: omega^2, variance over items of the difference of the two models' expected scores.
        within: sigma^2 of each model, the variance of repeated answers to one item.
        samples: K, answers of each model per item.
    """
    return math.ceil(_sum_of_quantiles(alpha, power) ** 2 * _variance(between, within, samples) / effect**2)


def smallest_effect(
    n: int,
    between: float,
    within: tuple[float, float] = (0.0, 0.0),
    samples: tuple[int, int] = (1, 1),
    *,
    alpha: float = 0.05,
    power: float = POWER,
) -> float:
    """The smallest difference that n items find with the power; the inverse of `items_needed`."""
    return _sum_of_quantiles(alpha, power) * math.sqrt(_variance(between, within, samples) / n)


def half_width(share: float, n: int, alpha: float = 0.05) -> float:
    """Half-width of the normal interval of a share of n items, as in published tables of benchmarks."""
    return float(scipy.stats.norm.isf(alpha / 2.0)) * math.sqrt(share * (1.0 - share) / n)


@dataclass(frozen=True)
class RequiredSample:
    """The sample that would show a difference of a margin: so many items, or so many seeds in each arm.

    `items` is None if no number of items is enough, because seeds alone differ too much.
    """

    items: int | None
    seeds: int | None


def required_sample(
    margin: float, *, variance: float, units: int, further: float, runs: int, critical: float
) -> RequiredSample:
    """Items, or seeds in each arm, with which a difference of the margin would be found with POWER.

    Args:
        variance: of the difference, over `units` items.
        further: of the difference, of seeds.
        runs: seeds in the smaller arm now.
        critical: quantile of the test.
    """
    if not margin > 0.0:
        return RequiredSample(None, None)
    allowed = (margin / (critical + float(scipy.stats.norm.ppf(POWER)))) ** 2
    rest = allowed - further
    items = math.ceil(units * variance / rest) if rest > 0.0 else None
    if items is not None and items > MAX_ITEMS:
        items = None
    seeds = math.ceil(runs * (variance + further) / allowed) if allowed > 0.0 else None
    return RequiredSample(None if items is None else max(items, 2), seeds)


def signal_to_noise(score: float, seed_spread: float | None) -> float | None:
    """Score over the standard deviation between seeds (Madaan et al., 2024, section 3); None if unknown."""
    return abs(score) / seed_spread if seed_spread else None


def monotonicity(steps: Sequence[int], scores: Sequence[float], *, higher_is_better: bool) -> float | None:
    """Kendall's tau-b between steps and scores, 1 if every checkpoint is better than the last.

    None with fewer than CHECKPOINTS checkpoints, or if all scores are equal.
    """
    usable = [(step, score) for step, score in zip(steps, scores, strict=True) if math.isfinite(score)]
    if len(usable) < CHECKPOINTS or len({score for _, score in usable}) < 2:
        return None
    tau = float(scipy.stats.kendalltau(*zip(*usable, strict=True)).statistic)
    return tau if higher_is_better else -tau


def _sum_of_quantiles(alpha: float, power: float) -> float:
    return float(scipy.stats.norm.isf(alpha / 2.0) + scipy.stats.norm.ppf(power))


def _variance(between: float, within: tuple[float, float], samples: tuple[int, int]) -> float:
    return between + sum(sigma / k for sigma, k in zip(within, samples, strict=True))
