"""The phases of a training step and the use of the machine, computed from stored scalars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.pages.formatting import compact, number, percent
from fp8scope_dashboard.pages.hours.usage import gpus_of, usage_of_run
from fp8scope_dashboard.pages.hours.wording import HOUR, cost, hours
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries

PHASES: Final = ("time_forward", "time_backward", "time_optimizer", "time_other", "time_data")
"""From the bottom of the stack to its top."""

MAX_STEPS = 200_000
"""The most steps that are read; the last steps of a longer run."""
RECENT_STEPS = 200
"""The numbers beside the chart are means over these last steps."""


@dataclass(frozen=True)
class Split:
    """Mean seconds of each phase: `x` float64[N] steps, `seconds` float64[PHASES, N], without NaN."""

    x: Floats
    seconds: Floats

    @property
    def total(self) -> Floats:
        return np.asarray(self.seconds.sum(axis=0))

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's share of the total time, 0 to 1; empty if the total is zero."""
        sums = self.seconds.sum(axis=1)
        whole = float(sums.sum())
        return dict(zip(PHASES, (sums / whole).tolist(), strict=True)) if whole > 0 else {}


def read_split(run_id: UUID, *, first: int | None, last: int | None, points: int) -> Split:
    """The phases over steps first..last, in at most `points` buckets."""
    stored = queries.step_range(run_id)
    if stored is None:
        return bucket_means(np.zeros(0, np.int64), np.zeros((len(PHASES), 0)), points)
    end = stored[1] if last is None else min(last, stored[1])
    begin = max(stored[0] if first is None else first, end - MAX_STEPS + 1)
    series = [queries.scalar(run_id, name, first=begin, last=end) for name in PHASES]
    steps = np.unique(np.concatenate([scalar.steps for scalar in series]))
    seconds = np.full((len(PHASES), len(steps)), np.nan)
    for row, scalar in zip(seconds, series, strict=True):
        row[np.searchsorted(steps, scalar.steps)] = scalar.values
    return bucket_means(steps, seconds, points)


def bucket_means(steps: NDArray[np.int64], seconds: Floats, buckets: int) -> Split:
    """Means over neighbouring steps. Unlike medians, they add up to the step time.

    `steps` int64[N] increasing, `seconds` float64[phases, N]. Steps with an invalid phase (NaN,
    infinite or negative) are left out, because their total would be wrong.
    """
    complete = (np.isfinite(seconds) & (seconds >= 0)).all(axis=0)
    steps, seconds = steps[complete], seconds[:, complete]
    if not len(steps):
        return Split(np.zeros(0), np.zeros((len(seconds), 0)))
    edges = np.unique(np.linspace(0, len(steps), min(buckets, len(steps)) + 1).astype(np.int64))
    counts = np.diff(edges)
    means = np.add.reduceat(seconds, edges[:-1], axis=1) / counts
    middles = np.add.reduceat(steps.astype(np.float64), edges[:-1]) / counts
    return Split(middles, means)


@dataclass(frozen=True)
class KeyFigure:
    """One number beside the chart; `term` is its entry in the glossary, `amount` the number itself."""

    term: str
    value: str
    amount: float | None = None


def recent_figures(run: Run) -> list[KeyFigure]:
    """The run's measured speed and use of the machine over its last steps."""
    last: dict[str, float | None] = run.last_scalars or {}
    figures: list[KeyFigure] = []
    for name, render in _MEANS.items():
        if name in last and (mean := _recent_mean(run, name)) is not None:
            figures.append(KeyFigure(name, render(mean), mean))
    memory = next((name for name in _MEMORY if _is_number(last.get(name))), "")
    for name in (memory, *(name for name in ("memory_peak",) if memory != "memory_rss")):
        if name and _is_number(value := last.get(name)):
            figures.append(KeyFigure(name, gibibytes(float(value or 0)), float(value or 0)))
    for name in ("gpu_ecc_uncorrected", "gpu_xid"):
        if _is_number(value := last.get(name)) and (value or name == "gpu_xid"):
            figures.append(KeyFigure(name, number(value), float(value or 0)))
    if units := _on_fp8_units(run):
        figures.append(KeyFigure("fp8_units", units))
    return figures


def hours_figures(run: Run) -> list[KeyFigure]:
    """The run's hours so far, and their cost where the project has a price."""
    usage = usage_of_run(run)
    if usage is None:
        return []
    term = "gpu_hours" if gpus_of(run) else "process_hours"
    figures = [KeyFigure(term, hours(usage.seconds), usage.seconds / HOUR)]
    if (price := run.project.gpu_hour_price) is not None:
        figures.append(KeyFigure("cost", cost(usage.seconds, price), price * usage.seconds / HOUR))
    return figures


def _on_fp8_units(run: Run) -> str:
    """The share of FP8 products that ran on FP8 units; empty on a CPU, or if the agent has not said it."""
    training = run.environment.get("training")
    if not isinstance(training, dict) or training.get("device") == "cpu":
        return ""
    facts = training.get("fp8_units")
    if not isinstance(facts, dict):
        return ""
    whole, part = facts.get("products"), facts.get("on_units")
    is_sound = isinstance(whole, int) and isinstance(part, int) and 0 <= part <= whole > 0
    return f"{number(part)} of {number(whole)}" if is_sound else ""


_MEANS: Final[dict[str, Callable[[float], str]]] = {
    "tokens_per_second": compact,
    "mfu": percent,
    "model_flops_per_second": lambda value: f"{tera(value)}FLOP/s",
    "gpu_utilization": percent,
    "gpu_power_watts": lambda value: f"{number(value, 3)} W",
    "gpu_sm_clock_mhz": lambda value: f"{number(value, 4)} MHz",
}
_MEMORY: Final = ("memory_reserved", "memory_allocated", "memory_rss")


def _recent_mean(run: Run, name: str) -> float | None:
    if run.last_step is None:
        return None
    values = queries.scalar(run.id, name, first=run.last_step - RECENT_STEPS + 1, last=run.last_step).values
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def tera(value: float) -> str:
    """A number of operations with a unit prefix: 1.2 G, 395 T."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{number(value / size, 3)} {unit}"
    return f"{number(value, 3)} "


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def gibibytes(value: float) -> str:
    """A number of bytes in GiB or MiB."""
    unit, size = ("GiB", 2**30) if value >= 2**30 else ("MiB", 2**20)
    return f"{number(value / size, 3)} {unit}"
