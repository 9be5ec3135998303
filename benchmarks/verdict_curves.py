"""Simulated groups of equal runs for `verdicts.py`, and harms that begin in the course of a run.

The groups are unlike the public curves on purpose: noise that is not shared between runs, seeds that wander
lastingly, heavy tails, batches with spikes, a warm-up in which seeds are ahead or behind, few points, and a
seed that is odd. A group is a function that draws so many runs of one configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from fp8scope_dashboard.analysis.losses.alignment import LossCurve

Floats = NDArray[np.float64]
Chance = np.random.Generator
Draw = Callable[[Chance, int], list[LossCurve]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of simulated runs; deviations are relative to the loss.

    Attributes:
        points, every: logged points, and steps between them.
        noise, rho: standard deviation and AR(1) coefficient of the noise of one run.
        batches: standard deviation of the noise that all runs of a trial share.
        offset: standard deviation of constant offsets between seeds.
        wander: that of a random walk at the end of the run.
        lag: share of its steps by which a seed is ahead or behind, one standard deviation.
        tails: degrees of freedom of Student's t of the noise; 0 for normal noise.
        spikes: share of points at which a run jumps by ten deviations, for some points.
        odd: lasting excess of one seed in fifteen.
    """

    points: int = 1500
    every: int = 1
    noise: float = 0.0015
    rho: float = 0.0
    batches: float = 0.03
    offset: float = 0.0005
    wander: float = 0.0
    lag: float = 0.0
    tails: float = 0.0
    spikes: float = 0.0
    odd: float = 0.0

    def draw(self, chance: Chance, count: int) -> list[LossCurve]:
        """So many runs of one trial."""
        batches = self.batches * chance.normal(size=self.points)
        return [self._run(chance, batches) for _ in range(count)]

    def _run(self, chance: Chance, batches: Floats) -> LossCurve:
        points = self.points
        steps = self.every * np.arange(1, points + 1)
        reached = np.arange(points) * np.exp(self.lag * chance.normal())
        level = 1.2 + 1.5 * np.exp(-reached / (0.15 * points))
        walk = np.cumsum(chance.normal(size=points)) / np.sqrt(points)
        offset = self.offset * chance.normal() + self.odd * (chance.random() < 1.0 / 15.0)
        own = self.noise * (1.0 + 3.0 * np.exp(-np.arange(points) / (0.1 * points)))
        relative = offset + self.wander * walk + own * self._noise(chance) + batches
        return LossCurve(steps=steps, losses=level * (1.0 + relative), planned=int(steps[-1]))

    def _noise(self, chance: Chance) -> Floats:
        if self.tails:
            return np.asarray(chance.standard_t(self.tails, self.points))
        noise = autoregressive(chance, self.points, self.rho)
        if self.spikes:
            hits = chance.random(self.points) < self.spikes
            noise = noise + lfilter([10.0], [1.0, -0.7], hits * chance.exponential(size=self.points))
        return noise


def autoregressive(chance: Chance, points: int, rho: float) -> Floats:
    """AR(1) noise of standard deviation 1."""
    noise = chance.normal(size=points + 1000)
    scale = float(np.sqrt(1.0 - rho * rho))
    return np.asarray(scale * lfilter([1.0], [1.0, -rho], noise)[1000:])


def simulated() -> dict[str, Draw]:
    """The groups by name."""
    kinds = {
        "38 points, noise 5 %": Kind(points=38, every=10, noise=0.05, batches=0.0, offset=0.0),
        "38 points, noise 5 %, seeds .5 %": Kind(points=38, every=10, noise=0.05, batches=0.0, offset=0.005),
        "38 points, AR(1) .9, noise 3 %": Kind(
            points=38, every=10, noise=0.03, rho=0.9, batches=0.0, offset=0.0
        ),
        "38 points, shared batches, noise .5 %": Kind(points=38, every=50, noise=0.005),
        "300 points, AR(1) .3, noise 3 %": Kind(points=300, noise=0.03, rho=0.3, batches=0.0, offset=0.0),
        "300 points, AR(1) .9, noise 3 %": Kind(points=300, noise=0.03, rho=0.9, batches=0.0, offset=0.0),
        "1500 points, AR(1) .99, noise 1 %": Kind(noise=0.01, rho=0.99, batches=0.0, offset=0.0),
        "1000 points, noise .2 %, seeds .05 %": Kind(points=1000, noise=0.002),
        "1000 points, noise .2 %, seeds .1 %": Kind(points=1000, noise=0.002, rho=0.3, offset=0.001),
        "1500 points, seeds wander by .1 %": Kind(wander=0.001),
        "1500 points, seeds wander by .3 %": Kind(wander=0.003, offset=0.0),
        "1500 points, seeds wander by .5 %": Kind(wander=0.005, offset=0.0),
        "1500 points, heavy tails": Kind(noise=0.002, tails=2.0),
        "1500 points, spikes of single runs": Kind(spikes=0.01),
        "1500 points, seeds ahead or behind by 1 %": Kind(lag=0.01),
        "200 points, every 5 steps": Kind(points=200, every=5, noise=0.003),
        "100 points, every 10 steps": Kind(points=100, every=10, noise=0.003),
        "1500 points, unshared noise 4 %": Kind(noise=0.04, rho=0.1, batches=0.0, offset=0.001),
        "1500 points, one odd seed of 15": Kind(odd=0.01),
    }
    return {f"simulated: {name}": kind.draw for name, kind in kinds.items()}


HARMS = {
    "+0.5 %": lambda since, rest: 0.005 * (since >= 0.0),
    "+1 %": lambda since, rest: 0.01 * (since >= 0.0),
    "+2 %": lambda since, rest: 0.02 * (since >= 0.0),
    "+5 %": lambda since, rest: 0.05 * (since >= 0.0),
    "ramp to 5 % at the end": lambda since, rest: 0.05 * np.clip(since / rest, 0.0, 1.0),
    "slope to 8 % at the end": lambda since, rest: 0.08 * np.clip(since / rest, 0.0, 1.0) ** 1.5,
}
"""Relative rise by the share of the run since the onset, and the share that is left at the onset."""


def harmed(curve: LossCurve, harm: str, onset: float) -> tuple[LossCurve, Floats]:
    """The curve with a harm from a share of the run on, and the rise at each of its points."""
    share = curve.steps / curve.steps[-1]
    rise = np.asarray(HARMS[harm](share - onset, 1.0 - onset), np.float64)
    return replace(curve, losses=curve.losses * (1.0 + rise)), rise
