"""Waiting for data, and savings: measured in the runs with the most hours.

A project can have ten thousand runs, and one that ran for an hour changes no total. So at most MAX_WAITS and
usage.MAX_RUNS runs are read, and each figure says which share of the hours it was measured in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.hours.usage import RunUsage
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

MAX_WAITS: Final = 40
MAX_BUCKETS: Final = 64
MIN_STRIDE: Final = 64
"""The smallest buckets that the store keeps."""
MAX_RATIO: Final = 10.0
"""A speed whose interval is wider than this factor is no number."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Seconds of waiting for data in the runs that were read, without what they lost to other reasons.

    Attributes:
        measured: seconds of the runs that send how long they wait.
        read: seconds of all runs that were read.
    """

    seconds: float
    measured: float
    read: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Seconds that BF16 would have needed beyond those of the FP8 runs that were compared.

    Attributes:
        low, high: the sums of the bounds of each run's interval, which holds however the errors are related.
        measured: seconds of the compared runs.
        read: seconds of the FP8 runs that were looked at.
    """

    seconds: float
    low: float
    high: float
    measured: float
    read: float
    runs: int


def waiting_in(largest: Sequence[RunUsage]) -> Waiting:
    """The time of the largest runs in which they waited for data."""
    listed = largest[:MAX_WAITS]
    facts = Run.objects.filter(pk__in=[run.id for run in listed]).values_list(
        "pk", "rows_stored", "last_step", "last_scalars__time_data"
    )
    rows = {pk: (stored, last) for pk, stored, last, sent in facts if sent is not None and last is not None}
    shares = {
        pk: share for pk, (stored, last) in rows.items() if (share := _share(pk, stored, last)) is not None
    }
    return Waiting(
        seconds=sum((run.seconds - run.lost) * shares[run.id] for run in listed if run.id in shares),
        measured=sum(run.seconds for run in listed if run.id in shares),
        read=sum(run.seconds for run in listed),
        runs=len(shares),
    )


@lru_cache(maxsize=8 * MAX_WAITS)
def _share(run_id: UUID, rows_stored: int, last_step: int) -> float | None:
    """The share of a run's time in which it waited for data; None without both times.

    Args:
        rows_stored: grows with every row, so that the result for the same number stays the same.
    """
    stride = MIN_STRIDE
    while last_step // stride > MAX_BUCKETS:
        stride *= 2
    means = queries.scalar_means(run_id, {"time_data": stride, "step_seconds": stride})
    waits, steps = means["time_data"], means["step_seconds"]
    _, mine, theirs = np.intersect1d(waits.ends, steps.ends, return_indices=True)
    waited, whole = waits.means[mine], steps.means[theirs]
    with np.errstate(invalid="ignore", over="ignore"):
        valid = np.isfinite(waited) & np.isfinite(whole) & (waited >= 0.0) & (whole > 0.0)
        total = float((whole[valid] * steps.counts[theirs][valid]).sum())
        share = float((waited[valid] * waits.counts[mine][valid]).sum()) / total if total > 0.0 else np.nan
    return min(1.0, share) if np.isfinite(share) else None


def savings_of(largest: Sequence[RunUsage]) -> Savings:
    """The time that the largest FP8 runs have saved, or cost, by the comparisons with their baselines.

    By the speed to the same loss; by the throughput where the cost in tokens is not known.
    """
    listed = {run.id: run for run in largest if run.precision == "fp8"}
    stored = Comparison.objects.filter(run__in=list(listed)).values_list(
        "run_id", "result__quantities__net", "result__quantities__throughput"
    )
    runs, measured, sums = 0, 0.0, np.zeros(3)
    for run_id, net, throughput in stored:
        speed = _speed(net) or _speed(throughput)
        if speed is not None:
            seconds = listed[run_id].seconds
            runs, measured = runs + 1, measured + seconds
            sums += seconds * (np.array(speed) - 1.0)
    saved, low, high = sums.tolist()
    read = sum(run.seconds for run in listed.values())
    return Savings(seconds=saved, low=low, high=high, measured=measured, read=read, runs=runs)


def _speed(entry: Any) -> tuple[float, float, float] | None:
    """A ratio with its bounds; None without one, or if it is too uncertain."""
    if not isinstance(entry, dict) or not entry.get("ratio"):
        return None
    ratio = float(entry["ratio"])
    low, high = entry.get("interval") or (ratio, ratio)
    return (ratio, float(low), float(high)) if high <= MAX_RATIO * low else None
