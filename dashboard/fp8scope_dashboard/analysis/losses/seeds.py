"""The spread of the loss between runs that differ only in their seed.

One or two seeds do not show their spread. So the variance of a group is shrunk towards a prior, a scaled
inverse chi-square distribution with spread s0 and d0 degrees of freedom (empirical Bayes: Smyth, 2004): with
the group's own variance s^2 of f degrees of freedom it becomes (d0 s0^2 + f s^2) / (d0 + f) with d0 + f
degrees of freedom. The prior is estimated from the project's groups, and from public runs before there are
any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import scipy

from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.robust import MAD_TO_SIGMA
from fp8scope_dashboard.statistics.student import upper_quantile

Source = Literal["own", "project", "public"]


@dataclass(frozen=True)
class Prior:
    """A scaled inverse chi-square distribution of the variance between seeds.

    Attributes:
        spread: s0, relative to the loss (or in nats, where a loss is near 0).
        freedom: d0, degrees of freedom: how much it weighs against a group's own seeds.
    """

    spread: float
    freedom: float
    source: Source = "public"


# Three times the spread of public curves, with fewer degrees of freedom. Chosen, not fitted: those are
# large pre-trainings, and small or short trainings, of which no public groups are at hand, spread more.
# `benchmarks/verdicts.py --prior` estimates .00035 and 7 (.00034 to .00035, 6 to 17 with a group left out).
PUBLIC: Final = Prior(0.0011, 3.0)
PUBLIC_NATS: Final = Prior(0.0036, 3.0)
# Groups of one project differ too: their common spread never counts for more seeds than this.
MAX_FREEDOM = 8.0
# A group whose variance exceeds the prior's beyond this quantile of F is not one of the prior's groups. Lower
# than a usual test: shrinking the spread of a noisy group by mistake gives wrong claims.
CONFLICT = 0.75
# The same for a warning to people. One healthy group in four exceeds CONFLICT, one in a hundred this.
WIDE = 0.99
# A seed is odd beyond this many robust standard deviations, and at this level of a test against the others.
ODD_DEVIATIONS = 6.0
ODD_LEVEL = 0.002
# With fewer seeds nothing shows which one is odd.
SEEDS_FOR_ODD = 3
# From so many seeds on, the spread counts as the group's own.
SEEDS_OF_OWN = 3


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The spread between seeds that a verdict uses.

    Attributes:
        value: standard deviation, relative to the loss or in nats.
        freedom: degrees of freedom of its estimate.
        seeds: number of baseline runs that it is based on.
        odd: indices of baseline runs that were left out, in the sequence given to `compare_losses`.
        conflict: the own seeds spread more than the prior allows, so the prior is not used.
        wide: they spread so much more that one of them may have diverged.
    """

    value: float
    freedom: float
    source: Source
    seeds: int
    odd: tuple[int, ...] = ()
    conflict: bool = False
    wide: bool = False

    def error(self, *arms: int) -> float:
        """Standard error of the difference of the means of two arms with so many seeds."""
        return self.value * math.sqrt(sum(1.0 / count for count in arms))

    def quantile(self, alpha: float) -> float:
        """Two-sided Student quantile at the spread's degrees of freedom."""
        return upper_quantile(alpha / 2.0, self.freedom)

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "odd": list(self.odd)}


def variance_of(arms: Sequence[Floats]) -> tuple[float, float]:
    """Variance within arms, float64[K] each, pooled, and its degrees of freedom; 0, 0 without two seeds."""
    freedom = sum(len(arm) - 1 for arm in arms if len(arm) > 1)
    if not freedom:
        return 0.0, 0.0
    squares = sum(float(((arm - arm.mean()) ** 2).sum()) for arm in arms if len(arm) > 1)
    return squares / freedom, float(freedom)


def spread_of(arms: Sequence[Floats], prior: Prior, *, seeds: int, noise: float = 0.0) -> Spread:
    """The spread of seeds from arms of values on the prior's scale, float64[K] each, of one configuration.

    Args:
        seeds: number of baseline runs among the values.
        noise: standard error of one value, which it has besides the spread between seeds: the prior is of the
            latter only. Without it, noisy seeds that agree by chance would count as precise.
    """
    own, freedom = variance_of(arms)
    expected = replace(prior, spread=math.hypot(prior.spread, noise))
    variance, total, conflict = shrunk(own, freedom, expected)
    source: Source = "own" if conflict or seeds >= SEEDS_OF_OWN else prior.source
    wide = shrunk(own, freedom, expected, WIDE)[2]
    return Spread(
        value=math.sqrt(variance), freedom=total, source=source, seeds=seeds, conflict=conflict, wide=wide
    )


def cautious_spread(arms: Sequence[Floats], prior: Prior, *, seeds: int, noise: float = 0.0) -> Spread:
    """The spread of seeds for a claim that there is no difference.

    The prior has one degree of freedom less than for the claim of a difference, because seeds of a group
    unlike the prior's spread more; and it is pooled with the own seeds even where these spread more. So each
    seed narrows the bound in expectation, and none makes the claim vaguer.
    """
    own, freedom = variance_of(arms)
    weight = max(prior.freedom - 1.0, 1.0)
    expected = prior.spread**2 + noise**2
    variance = (weight * expected + freedom * own) / (weight + freedom)
    source: Source = "own" if seeds >= SEEDS_OF_OWN else prior.source
    return Spread(value=math.sqrt(variance), freedom=weight + freedom, source=source, seeds=seeds)


def shrunk(own: float, freedom: float, prior: Prior, conflict: float = CONFLICT) -> tuple[float, float, bool]:
    """A variance with so many degrees of freedom, shrunk towards a prior.

    Args:
        conflict: quantile of F beyond which the own variance conflicts with the prior.

    Returns:
        The variance, its degrees of freedom, and whether the own variance conflicts with the prior: then it
        is returned as it is.
    """
    if freedom and own > prior.spread**2 * float(scipy.special.fdtri(freedom, prior.freedom, conflict)):
        return own, freedom, True
    total = prior.freedom + freedom
    return (prior.freedom * prior.spread**2 + freedom * own) / total, total, False


def odd_seeds(values: Floats, prior: Prior) -> list[int]:
    """Indices of seeds, float64[K], that are far from the others, as of a run that diverged but is finite.

    A seed must be far from the median in robust deviations (1.4826 MAD, at least the prior's spread), and
    from the mean of the others by a t test whose level is ODD_LEVEL over the number of seeds. At most a
    minority is odd; none of fewer than three seeds.
    """
    count = len(values)
    if count < SEEDS_FOR_ODD:
        return []
    distance = np.abs(values - np.median(values))
    scale = max(MAD_TO_SIGMA * float(np.median(distance)), prior.spread)
    suspects = [int(i) for i in np.argsort(-distance) if distance[i] > ODD_DEVIATIONS * scale]
    suspects = suspects[: (count - 1) // 2]
    others = np.delete(values, suspects)
    spread = spread_of([others], prior, seeds=len(others))
    limit = spread.quantile(ODD_LEVEL / count) * spread.error(1, len(others))
    return sorted(i for i in suspects if abs(values[i] - others.mean()) > limit)


def pooled_prior(groups: Sequence[Floats], public: Prior = PUBLIC) -> Prior:
    """The prior of a project, from the final losses of its groups of seeds, each float64[seeds].

    The groups' pooled relative variance is combined with the public prior as if that were one more group. Odd
    seeds are left out. Without a group of two seeds it is the public prior.
    """
    arms = []
    for losses in groups:
        values = losses[np.isfinite(losses)]
        if len(values) < 2 or not abs(float(np.median(values))) > 0.0:
            continue
        values = values / abs(float(np.median(values)))
        arms.append(np.delete(values, odd_seeds(values, public)))
    variance, freedom = variance_of(arms)
    if not freedom:
        return public
    total = public.freedom + freedom
    spread = math.sqrt((public.freedom * public.spread**2 + freedom * variance) / total)
    return replace(public, spread=spread, freedom=min(total, MAX_FREEDOM), source="project")
