"""Simulate how often the intervals of the quantities hold the truth. Prints one JSON line per case.

`coverage` is the share of `simulations` whose interval holds the true value; the goal is 93 to 97 % at a
level of 95 %. `error` is its standard error, `width` the median width of the intervals, and `refused` the
share of simulations in which the method said that it cannot tell.

- `tokens_cost`: a power-law loss; the FP8 run needs a fixed share of additional tokens. Noise of the batches
  is white or AR(1), shared by the runs (paired) or not, over long runs and runs of 38 points; seeds differ by
  an offset with a standard deviation that is known, or estimated from the runs.
- `throughput`: step times with AR(1) noise, changing variance, pauses every 50 steps and a slow beginning;
  with a node's own speed where there are several runs.
- `time_to_loss`: the power-law losses and step times with AR(1) noise, of FP8 runs that are faster and need
  more tokens; seeds differ by an offset.

    python benchmarks/coverage.py [--simulations 400] [--only tokens_cost]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from fp8scope_dashboard.analysis.quantities.measured import MeasuredRun, MeasuredScalar
from fp8scope_dashboard.analysis.quantities.ratios import throughput
from fp8scope_dashboard.analysis.quantities.time_to_loss import time_to_loss
from fp8scope_dashboard.analysis.quantities.tokens_cost import LossSpread, tokens_cost

Floats = NDArray[np.float64]
Interval = tuple[float, float]
# The interval of one simulation, or None if refused, and the value that it should hold.
Simulation = Callable[[np.random.Generator], Interval | None]


@dataclass(frozen=True, kw_only=True)
class CostCase:
    """Runs of one simulation of the cost in tokens."""

    name: str
    steps: int
    noise: float
    correlation: float = 0.0
    paired: bool = True
    more: float = 0.018
    runs: tuple[int, int] = (1, 1)
    seed_spread: float = 0.0
    known_spread: bool = False

    def simulate(self, random: np.random.Generator) -> Interval | None:
        x = np.arange(1.0, self.steps + 1.0) * 65_536.0
        batches = ar1(random, self.steps, self.correlation, self.noise)
        arms = []
        for count, factor in zip(self.runs, (1.0 + self.more, 1.0), strict=True):
            arm = []
            for _ in range(count):
                own = ar1(random, self.steps, self.correlation, self.noise)
                noise = batches + 0.2 * own if self.paired else own
                loss = power_law(x / x[-1] / factor) + noise + random.normal(0.0, self.seed_spread)
                arm.append(MeasuredRun(MeasuredScalar(np.arange(1, self.steps + 1), loss), x))
            arms.append(arm)
        spread = LossSpread(self.seed_spread, 1e6) if self.known_spread else None
        return tokens_cost(*arms, spread=spread).interval


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """Runs of one simulation of the throughput."""

    name: str
    steps: int
    noise: float = 0.03
    correlation: float = 0.0
    changing: bool = False
    ratio: float = 1.31
    runs: tuple[int, int] = (1, 1)
    node_spread: float = 0.0

    def simulate(self, random: np.random.Generator) -> Interval | None:
        arms = []
        for count, speed in zip(self.runs, (self.ratio, 1.0), strict=True):
            arms.append([self._run(random, speed) for _ in range(count)])
        return throughput(*arms).interval

    def _run(self, random: np.random.Generator, speed: float) -> MeasuredRun:
        logarithm = ar1(random, self.steps, self.correlation, self.noise)
        if self.changing:
            logarithm *= np.linspace(0.5, 2.0, self.steps)
        seconds = np.exp(logarithm + random.normal(0.0, self.node_spread)) / speed
        seconds[49::50] *= 3.0
        seconds[:3] *= 20.0
        steps = np.arange(1, self.steps + 1)
        rate = MeasuredScalar(steps, 65_536.0 / seconds)
        return MeasuredRun(MeasuredScalar(steps, np.ones(self.steps)), None, {"tokens_per_second": rate})


@dataclass(frozen=True, kw_only=True)
class TimeCase:
    """Runs of one simulation of the time to the same loss."""

    name: str
    steps: int
    noise: float = 0.05
    correlation: float = 0.0
    speed: float = 1.31
    more: float = 0.018
    runs: tuple[int, int] = (1, 1)
    seed_spread: float = 0.0
    known_spread: bool = False

    def simulate(self, random: np.random.Generator) -> Interval | None:
        sides = ((self.runs[0], self.speed, self.more), (self.runs[1], 1.0, 0.0))
        arms = [[self._run(random, speed, more) for _ in range(count)] for count, speed, more in sides]
        spread = LossSpread(self.seed_spread, 1e6) if self.known_spread else None
        return time_to_loss(*arms, spread=spread).interval

    def _run(self, random: np.random.Generator, speed: float, more: float) -> MeasuredRun:
        steps = np.arange(1, self.steps + 1)
        noise = ar1(random, self.steps, self.correlation, self.noise) + random.normal(0.0, self.seed_spread)
        loss = power_law(steps / self.steps / (1.0 + more)) + noise
        seconds = np.exp(ar1(random, self.steps, 0.5, 0.03)) / speed
        return MeasuredRun(
            MeasuredScalar(steps, loss), None, {"step_seconds": MeasuredScalar(steps, seconds)}
        )


Case = CostCase | SpeedCase | TimeCase


def power_law(share: Floats) -> Floats:
    """The loss after a share of the planned tokens."""
    return np.asarray(1.7 + 1.4 * share**-0.3)


def ar1(random: np.random.Generator, count: int, correlation: float, deviation: float) -> Floats:
    """An AR(1) series of this standard deviation, float64[count]."""
    shocks = random.standard_normal(count + 200)
    series = lfilter([1.0], [1.0, -correlation], shocks)[200:]
    return np.asarray(series * deviation * np.sqrt(1.0 - correlation**2))


def cost_cases() -> Iterator[CostCase]:
    for correlation in (0.0, 0.5, 0.8):
        yield CostCase(
            name=f"2,000 steps, paired, r = {correlation}", steps=2_000, noise=0.05, correlation=correlation
        )
        yield CostCase(
            name=f"2,000 steps, not paired, r = {correlation}",
            steps=2_000,
            noise=0.05,
            correlation=correlation,
            paired=False,
        )
    yield CostCase(
        name="20,000 steps, not paired, r = 0.5", steps=20_000, noise=0.1, correlation=0.5, paired=False
    )
    yield CostCase(name="38 points, paired, r = 0", steps=38, noise=0.01)
    yield CostCase(name="38 points, paired, r = 0.5", steps=38, noise=0.01, correlation=0.5)
    yield CostCase(name="38 points, not paired, r = 0", steps=38, noise=0.01, paired=False)
    yield CostCase(name="38 points, not paired, r = 0.3", steps=38, noise=0.01, correlation=0.3, paired=False)
    yield CostCase(
        name="no cost, 2,000 steps", steps=2_000, noise=0.05, correlation=0.3, more=0.0, paired=False
    )
    yield CostCase(name="30 % more, 2,000 steps", steps=2_000, noise=0.05, correlation=0.3, more=0.3)
    yield CostCase(
        name="known seed spread, 1 v 1",
        steps=2_000,
        noise=0.05,
        correlation=0.3,
        seed_spread=0.004,
        known_spread=True,
    )
    yield CostCase(
        name="3 v 3 seeds", steps=2_000, noise=0.05, correlation=0.3, runs=(3, 3), seed_spread=0.004
    )
    yield CostCase(
        name="1 v 3 seeds", steps=2_000, noise=0.05, correlation=0.3, runs=(1, 3), seed_spread=0.004
    )
    yield CostCase(
        name="1 v 5 seeds", steps=2_000, noise=0.05, correlation=0.3, runs=(1, 5), seed_spread=0.004
    )


def speed_cases() -> Iterator[SpeedCase]:
    for correlation in (0.0, 0.5, 0.8, 0.95):
        yield SpeedCase(name=f"2,000 steps, r = {correlation}", steps=2_000, correlation=correlation)
    yield SpeedCase(
        name="2,000 steps, changing variance, r = 0.5", steps=2_000, correlation=0.5, changing=True
    )
    yield SpeedCase(
        name="20,000 steps, changing variance, r = 0.9", steps=20_000, correlation=0.9, changing=True
    )
    yield SpeedCase(name="200 steps, r = 0.5", steps=200, correlation=0.5)
    yield SpeedCase(name="100 steps, r = 0.3", steps=100, correlation=0.3)
    yield SpeedCase(name="60 steps, r = 0", steps=60)
    yield SpeedCase(name="38 steps, r = 0", steps=38)
    yield SpeedCase(name="38 steps, r = 0.3", steps=38, correlation=0.3)
    yield SpeedCase(name="3 v 3 runs, nodes differ", steps=500, runs=(3, 3), node_spread=0.02)
    yield SpeedCase(name="1 v 3 runs, nodes differ", steps=500, runs=(1, 3), node_spread=0.02)


def time_cases() -> Iterator[TimeCase]:
    for correlation in (0.0, 0.5, 0.8):
        yield TimeCase(name=f"2,000 steps, r = {correlation}", steps=2_000, correlation=correlation)
    yield TimeCase(name="200 steps, r = 0.3", steps=200, noise=0.02, correlation=0.3)
    yield TimeCase(name="38 steps, r = 0", steps=38, noise=0.01)
    yield TimeCase(name="FP8 is slower", steps=2_000, correlation=0.3, speed=0.8)
    yield TimeCase(
        name="known seed spread, 1 v 1", steps=2_000, correlation=0.3, seed_spread=0.004, known_spread=True
    )
    for runs in ((3, 3), (1, 3), (2, 5)):
        yield TimeCase(
            name=f"{runs[0]} v {runs[1]} seeds", steps=2_000, correlation=0.3, runs=runs, seed_spread=0.004
        )


def coverage(simulate: Simulation, truth: float, simulations: int) -> dict[str, float]:
    """Run the simulations and count."""
    intervals = [simulate(np.random.default_rng([seed, 11])) for seed in range(simulations)]
    known = [interval for interval in intervals if interval is not None]
    held = np.mean([low <= truth <= high for low, high in known])
    return {
        "coverage": round(100.0 * float(held), 1),
        "error": round(100.0 * float(np.sqrt(held * (1.0 - held) / len(known))), 1),
        "width": round(float(np.median([high - low for low, high in known])), 5),
        "refused": round(1.0 - len(known) / simulations, 3),
        "simulations": simulations,
    }


def _truth(case: Case) -> float:
    if isinstance(case, TimeCase):
        return case.speed / (1.0 + case.more)
    return case.more if isinstance(case, CostCase) else case.ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--simulations", type=int, default=400)
    parser.add_argument("--only", choices=["tokens_cost", "throughput", "time_to_loss"], help="one quantity")
    options = parser.parse_args()
    quantities: dict[str, Iterator[Case]] = {
        "tokens_cost": cost_cases(),
        "throughput": speed_cases(),
        "time_to_loss": time_cases(),
    }
    for quantity, cases in quantities.items():
        if options.only not in (None, quantity):
            continue
        for case in cases:
            truth = _truth(case)
            line = coverage(case.simulate, truth, options.simulations)
            print(json.dumps({"quantity": quantity, "case": case.name, **line}), flush=True)


if __name__ == "__main__":
    main()
