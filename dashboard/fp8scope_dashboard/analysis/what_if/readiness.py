"""Verdicts: which tensors are ready for a format, which need finer scaling, and which should stay in BF16.

The rule for a tensor, under the way its scales are chosen:

* At most MAX_SATURATED of its elements saturate. Clipping changes the largest elements, which carry most of
  the tensor. It is the rate from which the pages report some overflow. Block scales that round may clip the
  largest elements by a few per cent of themselves; that is part of the error.
* At most MAX_FLUSHED of them flush to zero, beyond what the format takes from any tensor: a normal tensor
  with an amax of 5 standard deviations loses P(|z| < 5 f / M), about 4 f / M of its elements, where f is the
  largest value that flushes. That is nothing in FP8 and 17 % in FP4. The error hardly shows flushed elements,
  because they are small; but each loses its sign as well, and sums over many small gradients lose them for
  good.
* The error is at most MAX_RATIO times the error that the mantissa bits cost any tensor. Then the format is
  limited by its precision, which a finer scale cannot change, and not by its range.

A tensor that fails is *finer* if the rule holds with a scale for each row or block, and *bf16* otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.distribution import Effect
from fp8scope_dashboard.analysis.what_if.targets import Target, Tensors, effect_of, finer
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import percent

MAX_SATURATED: Final = 1e-4
MAX_FLUSHED: Final = 0.01
MAX_RATIO: Final = 2.0
METHOD_VERSION: Final = 1

Verdict = Literal["ready", "finer", "bf16", "unknown"]


@dataclass(frozen=True, kw_only=True)
class TensorReadiness:
    """The verdict on one tensor.

    `reason` says which part of the rule fails; empty if none does. `finer` is the coarsest scaling with which
    the rule holds, for the verdict `finer`. `worst` orders tensors: the largest ratio to a limit of the rule.
    """

    index: int
    name: str
    verdict: Verdict
    reason: str
    finer: str
    worst: float


@dataclass(frozen=True)
class Readiness:
    """The verdicts on all tensors, in their order, and the effect of the target on them."""

    target: Target
    effect: Effect
    tensors: Sequence[TensorReadiness]

    def having(self, verdict: Verdict) -> list[TensorReadiness]:
        return [tensor for tensor in self.tensors if tensor.verdict == verdict]


def judge(tensors: Tensors, target: Target) -> Readiness:
    """Apply the rule to every tensor, and look for a finer scaling for those that fail."""
    effect = effect_of(tensors, target)
    observed = tensors.distribution.nonzero > 0
    ratios = limit_ratios(tensors, target, effect)
    passes = np.asarray((ratios <= 1.0).all(axis=0))
    names = _finer_names(tensors, target, observed & ~passes)
    judged = []
    for i, name in enumerate(tensors.names):
        if not observed[i]:
            verdict: Verdict = "unknown"
        elif passes[i]:
            verdict = "ready"
        else:
            verdict = "finer" if names[i] else "bf16"
        worst = float(np.max(ratios[:, i])) if observed[i] else 0.0
        judged.append(
            TensorReadiness(
                index=i,
                name=name,
                verdict=verdict,
                reason=_reason(tensors, effect, ratios, observed, i),
                finer=names[i],
                worst=worst,
            )
        )
    return Readiness(target, effect, judged)


def worst_first(readiness: Readiness) -> list[TensorReadiness]:
    """The tensors by verdict, and those with the same verdict by how far they are from the rule's limits."""
    order = {"bf16": 0, "finer": 1, "ready": 2, "unknown": 3}
    return sorted(readiness.tensors, key=lambda tensor: (order[tensor.verdict], -tensor.worst, tensor.index))


def smallest_set(errors: Floats, budget: float) -> NDArray[np.intp]:
    """The fewest tensors to keep in BF16 so that the mean of all tensors' errors is at most `budget`.

    `errors`: float64[T], Σ(x − q/s)² / Σx²; NaN is left out. A tensor in BF16 counts as no error. To first
    order, rounding errors are independent of each other and their powers add, so each tensor takes away its
    own error, whatever else is kept. Taking the largest first is therefore optimal: no other k tensors take
    away more than the k largest.
    """
    finite = np.flatnonzero(np.isfinite(errors))
    order = finite[np.argsort(-errors[finite], kind="stable")]
    rest = errors[finite].sum() - np.concatenate([[0.0], np.cumsum(errors[order])])
    allowed = budget * len(finite)
    # Differences of sums are rounded; the last of them is zero.
    enough = np.flatnonzero(rest <= allowed + 1e-12 * max(float(rest[0]), 0.0))
    return order[: int(enough[0])] if len(enough) else order


def default_budget(effect: Effect) -> float:
    """MAX_RATIO times the mean error that the mantissa bits cost; 0 without tensors."""
    finite = np.isfinite(effect.floor)
    return MAX_RATIO * float(effect.floor[finite].mean()) if finite.any() else 0.0


def limit_ratios(tensors: Tensors, target: Target, effect: Effect) -> Floats:
    """Saturation, flushes and error of each tensor relative to the limits of the rule, float64[3, T].

    The rule holds for a tensor if none of them is above 1.

    Saturation is judged by its high bound. Flushes and errors are judged by their estimates, because the
    bounds of blocks are wide.
    """
    saturated = effect.saturated.high if target.per_tensor else np.zeros(len(tensors))
    formats = [target.format.of(role) for role in tensors.roles]
    allowed = np.array([MAX_FLUSHED + 4.0 * format.flushed / format.largest for format in formats])
    with np.errstate(divide="ignore", invalid="ignore"):
        error = effect.error.estimate / (MAX_RATIO * effect.floor)
    ratios = np.stack([saturated / MAX_SATURATED, effect.flushed.estimate / allowed, error])
    return np.asarray(np.nan_to_num(ratios, nan=0.0, posinf=np.inf), np.float64)


def _finer_names(tensors: Tensors, target: Target, failing: NDArray[np.bool_]) -> list[str]:
    """For each failing tensor the title of the coarsest scaling with which it passes; empty if none does."""
    names = [""] * len(tensors)
    indices = np.flatnonzero(failing)
    for candidate in finer(target):
        if not len(indices):
            break
        some = tensors.take(indices)
        passes = (limit_ratios(some, candidate, effect_of(some, candidate)) <= 1.0).all(axis=0)
        for i in indices[passes].tolist():
            names[i] = candidate.title
        indices = indices[~passes]
    return names


def _reason(tensors: Tensors, effect: Effect, ratios: Floats, observed: NDArray[np.bool_], i: int) -> str:
    if not observed[i]:
        return "no finite elements other than zero in this step"
    reasons = []
    if ratios[0, i] > 1.0:
        reasons.append(f"{percent(effect.saturated.estimate[i])} of the elements saturate")
    if ratios[1, i] > 1.0:
        reasons.append(f"{percent(effect.flushed.estimate[i])} flush to zero")
    if ratios[2, i] > 1.0:
        factor = effect.error.estimate[i] / effect.floor[i]
        reasons.append(f"the error is {factor:.2g} times what the mantissa costs")
    if tensors.distribution.nonfinite[i] > 0:
        share = tensors.distribution.nonfinite[i] / tensors.distribution.numel[i]
        reasons.append(f"{percent(share)} are NaN or infinite")
    return "; ".join(reasons)
