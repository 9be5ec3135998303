"""The exponents of many tensors in one step, and counts that are known exactly or within bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.statistics.arrays import Floats

# The bins of the agent's histograms: one for each exponent of float32.
MIN_EXPONENT, MAX_EXPONENT = -149, 127


@dataclass(frozen=True)
class Distribution:
    """Exponents of T tensors in one step.

    Attributes:
        first: the exponent of the first bin.
        counts: float64[T, E], elements with floor(log2 |x|) = first + i.
        zeros, nonfinite: float64[T], elements that are zero, and that are NaN or infinite.
        amax: float64[T], largest |x| of the finite elements in this step; NaN if unknown.
    """

    first: int
    counts: Floats
    zeros: Floats
    nonfinite: Floats
    amax: Floats

    @classmethod
    def of(cls, histograms: Floats, amax: Floats | None = None) -> Distribution:
        """Read histograms float64[T, 279] of the wire: zeros, a bin per exponent, NaN and infinities.

        Exponents that no tensor has are left out. An `amax` that is not in the highest bin of its histogram
        is ignored: it belongs to other data.
        """
        counts = np.asarray(histograms[:, 1:-1], np.float64)
        used = np.flatnonzero(counts.any(axis=0))
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
        counts = counts[:, low:high]
        first = MIN_EXPONENT + low
        top = _top(counts, first)
        amaxes = np.full(len(counts), np.nan) if amax is None else np.asarray(amax, np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = (amaxes > 0) & np.isfinite(amaxes) & (np.frexp(amaxes)[1] - 1 == top)
        return cls(first, counts, histograms[:, 0], histograms[:, -1], np.where(fits, amaxes, np.nan))

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, indices: NDArray[np.intp]) -> Distribution:
        """Some of the tensors."""
        return Distribution(
            self.first,
            self.counts[indices],
            self.zeros[indices],
            self.nonfinite[indices],
            self.amax[indices],
        )

    @property
    def lower(self) -> Floats:
        """2^e of each bin, float64[E]; a bin holds 2^e <= |x| < 2^(e+1)."""
        return np.ldexp(1.0, np.arange(self.first, self.first + self.counts.shape[1]))

    @property
    def nonzero(self) -> Floats:
        """Finite elements that are not zero, float64[T]."""
        return np.asarray(self.counts.sum(axis=1), np.float64)

    @property
    def numel(self) -> Floats:
        """All elements, float64[T]."""
        return self.nonzero + self.zeros + self.nonfinite

    @property
    def top(self) -> NDArray[np.int64]:
        """The exponent of the highest bin that has elements, int64[T]; `first` - 1 for a tensor of zeros."""
        return _top(self.counts, self.first)

    @property
    def upper(self) -> Floats:
        """The end of each bin, float64[T, E]: 2^(e+1), but amax in the bin that holds it."""
        upper = np.broadcast_to(2.0 * self.lower, self.counts.shape).copy()
        observed = np.flatnonzero(np.isfinite(self.amax))
        upper[observed, self.top[observed] - self.first] = self.amax[observed]
        return upper

    @property
    def amax_bound(self) -> Floats:
        """amax, or where it is unknown 2^(e+1) of the highest bin: no element is larger. 0 without any."""
        bound = np.where(self.top < self.first, 0.0, np.ldexp(1.0, self.top + 1))
        return np.where(np.isfinite(self.amax), self.amax, bound)


def _top(counts: Floats, first: int) -> NDArray[np.int64]:
    if not counts.shape[1]:
        return np.full(len(counts), first - 1, np.int64)
    reversed_position = np.argmax(counts[:, ::-1] > 0, axis=1)
    top = first + counts.shape[1] - 1 - reversed_position
    return np.where(counts.any(axis=1), top, first - 1).astype(np.int64)


@dataclass(frozen=True)
class Bounds:
    """A number of each tensor that lies in [low, high], float64[T]; `estimate` is between them."""

    low: Floats
    estimate: Floats
    high: Floats

    @property
    def is_exact(self) -> NDArray[np.bool_]:
        return np.asarray(self.low == self.high)

    def per(self, total: Floats) -> Bounds:
        """The same as a share of `total`, float64[T]; NaN where it is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return Bounds(
                *(np.where(total > 0, part / total, np.nan) for part in (self.low, self.estimate, self.high))
            )


@dataclass(frozen=True)
class Effect:
    """The effect of a format and its scales on T tensors.

    Attributes:
        saturated, flushed: shares of a tensor's elements.
        error: Σ(x − q/s)² / Σx² over the finite elements, NaN for a tensor of zeros.
        floor: the estimated error of the same mantissa bits without limits of range, float64[T].
        scale: the multiplier for the whole tensor, float64[T]; NaN where blocks have scales of their own.
    """

    saturated: Bounds
    flushed: Bounds
    error: Bounds
    floor: Floats
    scale: Floats
