"""Streams of steps in which one rule after the other finds something; for `alert_latency.py`.

A scenario is named after the kind of its rule. `scalars` and `tensors` give the values of a step: calm ones
before the fault, then those that the rule opens an alert for within FAULTY_STEPS.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope.observe.collector import Collector
from fp8scope.observe.snapshot import NO_TENSORS, Observed

# Before the fault; at least the shortest past that the rules are given, and what a baseline needs.
CALM_STEPS = 90
FAULTY_STEPS = 110
STATISTICS = ("numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite")
TENSORS = 4
NUMEL, LARGEST = 10_000.0, 448.0
BASELINE = "baseline"

# The parameters of the rules: their pasts are short, so that a measurement takes seconds. The number of steps
# after which they open is the default, as far as that is possible.
SHORT_PAST = {"window": 20, "warmup": 0, "span": 5, "settle": 50}
OF_KIND = {"memory_creep": {"points": 5, "blocks": 2, "rise": 0.05}, "data_wait": {"points": 20}}

SCALAR_KINDS = (
    *("loss_not_finite", "loss_spike", "loss_divergence", "above_baseline", "grad_norm"),
    *("throughput_drop", "data_wait", "memory_creep", "threshold"),
)
# scale_disagreement needs several ranks; the rules of runs and ranks wait for so many seconds by definition.
TENSOR_KINDS = (
    *("tensor_not_finite", "saturation_rate", "saturation_rise", "underflow_rate", "underflow_rise"),
    *("scale_frozen", "scale_stale", "scale_jump", "amax_growth"),
    *("noise_growth", "kurtosis_growth", "logit_growth", "router_collapse", "update_growth"),
)
KINDS = (*SCALAR_KINDS, *TENSOR_KINDS)
# The scale must have followed within some 70 steps.
RECIPE = {"recipe": "DelayedScaling", "history_length": 1}


@dataclass(frozen=True, kw_only=True)
class Info:
    """An entry of the catalogue, as `fp8scope_kernels.TensorInfo`, without torch."""

    name: str
    module: str
    role: str = "input"
    format: str = "e4m3"
    shape: tuple[int, ...] = (100, 100)
    numel: int = int(NUMEL)


class Stream:
    """The steps of one run. `at` is the number of the step since the fault began; below 0 before that."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self._chance = random.Random(seed)
        self._amax = 1.0

    def _noisy(self, value: float, spread: float = 0.03) -> float:
        return value * math.exp(spread * self._chance.gauss(0.0, 1.0))

    def scalars(self, at: int) -> dict[str, float]:
        """The scalars of a step."""
        values = {
            "loss": 2.0 + self._chance.gauss(0.0, 0.01),
            "grad_norm": self._noisy(1.0),
            "step_seconds": self._noisy(0.05),
            **{f"time_{part}": self._noisy(0.01) for part in ("forward", "backward", "optimizer", "other")},
            "time_data": self._noisy(0.001),
            "memory_rss": 1e9,
        }
        if at < 0:
            return values
        faulty: dict[str, dict[str, float]] = {
            "loss_not_finite": {"loss": math.nan},
            "loss_spike": {"loss": 3.0},
            "loss_divergence": {"loss": 2.0 + min(0.1 * at, 4.0)},
            "above_baseline": {"loss": 3.0},
            "grad_norm": {"grad_norm": 20.0},
            "throughput_drop": {"step_seconds": self._noisy(0.2)},
            "data_wait": {"time_data": self._noisy(0.1)},
            "memory_creep": {"memory_rss": 1e9 * (1.0 + 0.02 * at)},
            "threshold": {"loss": 3.0},
        }
        return values | faulty.get(self.kind, {})

    def tensors(self, at: int) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """The statistics of a step, float64 [TENSORS, STATISTICS], and those of sampled steps by name."""
        rows = np.zeros((TENSORS, len(STATISTICS)))
        amax = np.array([self._noisy(1.0) for _ in range(TENSORS)])
        rows[:, 0], rows[:, 1], rows[:, 2] = NUMEL, amax, LARGEST / (1.2 * amax)
        rows[:, 4] = 100.0 + self._chance.randrange(20)
        extras = {
            name: np.array([self._noisy(value) for _ in range(TENSORS)])
            for name, value in (
                *(("sq_error", 1e-3), ("sq_signal", 1.0), ("kurtosis", 4.0), ("logit_bound", 10.0)),
                *(("load_imbalance", 0.1), ("update_ratio", 1e-3)),
            )
        }
        if at >= 0:
            self._spoil(rows[-1], extras, at)
        return rows, extras

    def _spoil(self, row: NDArray[np.float64], extras: dict[str, NDArray[np.float64]], at: int) -> None:
        match self.kind:
            case "tensor_not_finite":
                row[6] = 50.0
            case "saturation_rate" | "saturation_rise":
                row[3] = 500.0
            case "underflow_rate" | "underflow_rise":
                row[4] = 8_000.0
            case "scale_frozen":
                row[1], row[2] = 2.0 + 0.1 * at, LARGEST / 1.2
            case "scale_stale":
                row[2] /= 2.0**10
            case "scale_jump":
                row[2] *= 2.0**-12
            case "amax_growth":
                row[1], row[2] = row[1] * 64.0, row[2] / 64.0
            case "noise_growth":
                extras["sq_error"][-1] *= 30.0
            case "kurtosis_growth":
                extras["kurtosis"][-1] *= 30.0
            case "logit_growth":
                extras["logit_bound"][-1] *= 30.0
            case "router_collapse":
                extras["load_imbalance"][-1] = 0.95
            case "update_growth":
                extras["update_ratio"][-1] *= 30.0


class Taken:
    """A snapshot whose values are there already."""

    sampled = False
    event = None

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def read(self) -> Observed:
        return self._observed

    def release(self) -> None:
        pass


class StreamCollector(Collector):
    """Takes a step's statistics from a stream instead of a model. Set `at` before the end of each step."""

    stream: Stream
    at = -1
    _is_announced = False

    def new_tensors(self) -> Any:
        """The catalogue, once."""
        if self._is_announced:
            return None
        self._is_announced = True
        return (
            0,
            [Info(name=f"blocks.{i}.mlp.input", module=f"blocks.{i}.mlp") for i in range(TENSORS)],
            STATISTICS,
        )

    def snapshot(self, scalars: Any) -> Any:
        """The statistics of this step."""
        rows, extras = self.stream.tensors(self.at)
        return Taken(Observed(rows, extras, {}, NO_TENSORS, np.zeros((0, 0))))


def collect(run: Any, stream: Stream) -> StreamCollector:
    """Let a run of the agent take its tensors' statistics from a stream."""
    steps = run.session.steps
    collector = StreamCollector(steps.guard.caught, steps.budget)
    collector.stream = stream
    run.session.registration.set("recipe", RECIPE)
    steps.collector = collector
    return collector
