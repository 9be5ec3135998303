"""One tensor under every margin: what each would do, and which to choose.

A margin m divides the scale by 2^m, which leaves head room for larger values and flushes more small ones. All
margins are computed at once, as if they were tensors, so that a page can answer for each without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.distribution import Bounds, Distribution, Effect
from fp8scope_dashboard.analysis.what_if.formats import NumberFormat
from fp8scope_dashboard.analysis.what_if.readiness import judge, limit_ratios
from fp8scope_dashboard.analysis.what_if.targets import Target, Tensors, effect_of
from fp8scope_dashboard.analysis.what_if.tensor_scaling import scale_from_amax, tensor_effect
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import percent

MARGINS: Final = range(-8, 17)


@dataclass(frozen=True)
class Current:
    """The present quantisation of a tensor.

    Its format, the scale of the step, and the margin of the recipe.
    """

    format: NumberFormat
    scale: float
    margin: int = 0


@dataclass(frozen=True)
class MarginOutcomes:
    """The outcomes of the elements of one tensor under N scales.

    Attributes:
        scales: float64[N]; NaN if parts of the tensor have scales of their own.
        saturated, flushed: shares of the elements.
        subnormal: float64[N], the estimated share that keeps fewer bits; NaN for scales of parts.
        error: Σ(x − q/s)² / Σx².
    """

    scales: Floats
    saturated: Bounds
    flushed: Bounds
    subnormal: Floats
    error: Bounds


@dataclass(frozen=True)
class Advice:
    """The margin to choose, whether the rule of readiness holds with it, and why, in one sentence."""

    margin: int
    is_enough: bool
    text: str


def base_scale(tensors: Tensors, format: NumberFormat, current: Current | None) -> float:
    """The scale of margin 0 in a format: from the amax behind the current scale, else from this step's.

    A recipe takes s = M * 2^-margin / amax, so that scales of two formats for the same amax are as their M.
    """
    if current is not None:
        return current.scale * 2.0**current.margin * (format.largest / current.format.largest)
    return float(scale_from_amax(tensors.distribution.amax_bound, format, 0)[0])


def outcomes_of_scales(tensors: Tensors, format: NumberFormat, scales: Sequence[float]) -> MarginOutcomes:
    """Return what N scales for the whole tensor do to the one tensor of `tensors`."""
    repeated = _repeated(tensors.distribution, len(scales))
    effect = tensor_effect(repeated, format, np.array(scales, np.float64))
    return _outcomes(effect, _subnormal(repeated, format, effect))


def outcomes_of_margins(
    tensors: Tensors, format: NumberFormat, base: float, margins: Sequence[int] = MARGINS
) -> MarginOutcomes:
    """Return what each margin does to the one tensor of `tensors`, whose scale of margin 0 is `base`."""
    return outcomes_of_scales(tensors, format, [base * 2.0**-margin for margin in margins])


def outcomes_of_parts(tensors: Tensors, target: Target) -> MarginOutcomes:
    """Return what a scale for each row or block does to the one tensor of `tensors`."""
    return _outcomes(effect_of(tensors, target), np.full(1, np.nan))


def advise(
    tensors: Tensors, target: Target, base: float, current: Current | None, margins: Sequence[int] = MARGINS
) -> Advice:
    """The margin nearest to the current one with which the rule of readiness holds.

    If it holds with none, the margin that misses the limits of the rule least.
    """
    format = target.format.of(tensors.roles[0])
    scales = np.array([base * 2.0**-margin for margin in margins])
    repeated = tensors.take(np.zeros(len(margins), np.intp))
    effect = tensor_effect(repeated.distribution, format, scales)
    worst = limit_ratios(repeated, replace(target, scaling="fixed"), effect).max(axis=0)
    before = 0 if current is None else current.margin
    # The nearest first, and of two the one with more head room.
    order = sorted(range(len(margins)), key=lambda i: (abs(margins[i] - before), -margins[i]))
    passing = [i for i in order if worst[i] <= 1.0]
    best = passing[0] if passing else min(order, key=lambda i: float(worst[i]))
    margin = margins[best]
    then = f"margin {margin}"
    change = _difference(effect, best, _now(tensors, effect, current, before, margins))
    if passing and current is not None and margin == before and format is current.format:
        return Advice(margin, True, f"No change needed: with {then}, {change}.")
    if passing:
        return Advice(margin, True, f"{then.capitalize()}: {change}.")
    finer = judge(tensors, replace(target, scaling="fixed", scale=float(scales[best]))).tensors[0].finer
    rest = f"{finer} is" if finer else "no finer scaling is either: keep the tensor in BF16"
    return Advice(
        margin, False, f"No margin is enough in {format.name}; at best {then}: {change}. {_end(rest)}"
    )


def _end(text: str) -> str:
    ending = " enough." if text.endswith(" is") else "."
    return f"{text[:1].upper()}{text[1:]}{ending}"


def _now(
    tensors: Tensors, effect: Effect, current: Current | None, before: int, margins: Sequence[int]
) -> tuple[float, float] | None:
    """The shares that saturate and flush now; None if the tensor has no scale now."""
    if current is None:
        return None
    now = tensor_effect(tensors.distribution, current.format, np.array([current.scale]))
    return float(now.saturated.estimate[0]), float(now.flushed.estimate[0])


def _difference(effect: Effect, i: int, now: tuple[float, float] | None) -> str:
    saturated, zero = float(effect.saturated.estimate[i]), float(effect.flushed.estimate[i])
    if now is None:
        return f"{_percent(saturated)} of the elements saturate, {_percent(zero)} flush to zero"
    return f"saturation {_arrow(now[0], saturated)}, flush to zero {_arrow(now[1], zero)}"


def _arrow(before: float, after: float) -> str:
    shown = _percent(before), _percent(after)
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} → {shown[1]}"


def _percent(share: float) -> str:
    """No share that occurs reads as zero, and none that does not reads as rounded."""
    return "0 %" if share == 0 else "< 0.001 %" if share < 1e-5 else percent(share)


def _repeated(distribution: Distribution, n: int) -> Distribution:
    return distribution.take(np.zeros(n, np.intp))


def _subnormal(tensors: Distribution, format: NumberFormat, effect: Effect) -> Floats:
    """The estimated share of elements that are not flushed and stay below the smallest normal number.

    Those within half of the smallest subnormal of it are rounded up to it.
    """
    limit = format.smallest_normal - format.flushed
    low_end, high_end = (end * effect.scale[:, None] for end in (tensors.lower, tensors.upper))
    width = high_end - low_end
    share = np.divide(limit - low_end, width, out=(low_end < limit).astype(np.float64), where=width > 0)
    below = (tensors.counts * np.clip(share, 0.0, 1.0)).sum(axis=1) / np.maximum(tensors.numel, 1.0)
    return np.asarray(np.maximum(below - effect.flushed.estimate, 0.0), np.float64)


def _outcomes(effect: Effect, subnormal: NDArray[np.float64]) -> MarginOutcomes:
    return MarginOutcomes(effect.scale, effect.saturated, effect.flushed, subnormal, effect.error)
