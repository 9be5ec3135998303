"""Read what comparisons need of a run, bounded for runs of any length.

A curve of up to MAX_POINTS steps is read step by step. A longer one comes as means over fixed buckets of
2^k steps. Buckets of 64 steps and more are kept by the telemetry store, which brings them up to date after
resumed attempts, rewinds, late and duplicate rows. A bucket with a NaN is NaN, and one with an infinite loss
is infinite; it stands at the step that broke instead of at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import ScalarMeans

MAX_POINTS: Final = 16_384
"""A curve has at most this many points, in the range that is compared."""
STORED_STRIDE: Final = 64
"""The smallest buckets that the store keeps."""
SCALARS: Final = (
    "grad_norm", "tokens_per_second", "step_seconds", "memory_peak", "memory_reserved", "gpu_power_watts",
)  # fmt: skip
"""Read together with the loss, for the quantities."""
COARSER: Final = 8
"""Steps per bucket of these scalars of a long run, in buckets of its loss."""
MAX_BREAKS: Final = 16
"""Stretches of losses that are not finite whose steps are looked up."""
MAX_KEPT: Final = 32
"""Runs that a worker keeps in memory: finished baselines are read once. At most 1 MB each."""


@dataclass(frozen=True)
class RunReading:
    """A run as a comparison reads it: its loss curve, and the other scalars in the same buckets."""

    curve: LossCurve
    scalars: Mapping[str, ScalarMeans]


def stride_of(steps: int) -> int:
    """Steps per bucket of a curve of this many steps: a power of two, 1 for short curves.

    Buckets between 2 and 64 steps would be computed from all rows each time, so only those of 2 are used.
    """
    stride = 1
    while steps > MAX_POINTS * stride:
        stride = stride * 2 if stride != 2 else STORED_STRIDE
    return stride


def read_arms(ours: Sequence[UUID], theirs: Sequence[UUID]) -> tuple[list[RunReading], list[RunReading]]:
    """The runs of two arms. Buckets are equal in the range that the first run and the baseline share.

    The buckets follow from that range, so that a short run is compared step by step with a long baseline.
    """
    stored = Run.objects.filter(pk__in={*ours, *theirs}).values_list("pk", "rows_stored")
    # Read before the rows, so that rows that arrive meanwhile are read again by the next call.
    rows: dict[UUID, int] = dict(stored)
    ends = {run_id: _end(run_id, rows.get(run_id, 0)) for run_id in {*ours, *theirs}}
    others = [ends[run_id] for run_id in theirs] or [ends[ours[0]]]
    shared = min(ends[ours[0]], max(others))
    readings = {}
    for run_id, end in ends.items():
        near, far = stride_of(shared), stride_of(end)
        border = -(-(shared + 1) // far) * far
        is_longer = near != far and border <= end
        readings[run_id] = _read(run_id, rows.get(run_id, 0), near, (border, far) if is_longer else None)
    return [readings[run_id] for run_id in ours], [readings[run_id] for run_id in theirs]


@lru_cache(maxsize=4 * MAX_KEPT)
def _end(run_id: UUID, rows_stored: int) -> int:
    """The last step of a run; 0 if it has none."""
    steps = queries.step_range(run_id)
    return 0 if steps is None else steps[1]


@lru_cache(maxsize=MAX_KEPT)
def _read(run_id: UUID, rows_stored: int, near: int, rest: tuple[int, int] | None) -> RunReading:
    """A run in buckets of `near` steps.

    Args:
        rows_stored: grows with every row that is stored, so the result for the same number stays the same.
        rest: from which step on buckets have which (larger) number of steps, if the run goes on for long.
    """
    if rest is None:
        whole = _reading(queries.scalar_means(run_id, _strides(near)))
        return whole if near == 1 else _with_exact_breaks(run_id, whole)
    border, far = rest
    parts = (
        queries.scalar_means(run_id, _strides(near), last=border - 1),
        queries.scalar_means(run_id, dict.fromkeys(_strides(far), far), first=border),
    )
    joined = {name: _joined(parts[0][name], parts[1][name]) for name in parts[0] if name in parts[1]}
    return _with_exact_breaks(run_id, _reading(joined))


def _with_exact_breaks(run_id: UUID, reading: RunReading) -> RunReading:
    """The reading in which stretches of losses that are not finite begin and end at their own steps.

    People look for the step that a sentence names.
    """
    curve = reading.curve
    broken = np.diff((~np.isfinite(curve.losses)).astype(np.int8), prepend=0, append=0)
    stretches = np.flatnonzero(broken).reshape(-1, 2)[:MAX_BREAKS]
    steps = curve.steps.copy()
    for begin, end in stretches.tolist():
        for at, which in {begin: 0, end - 1: -1 if end - 1 > begin else 0}.items():
            first = int(curve.steps[at - 1]) + 1 if at else None
            raw = queries.scalar(run_id, "loss", first=first, last=int(curve.steps[at]), timed=False)
            exact = raw.steps[~np.isfinite(raw.values)]
            if len(exact):
                steps[at] = exact[which]
    return replace(reading, curve=replace(curve, steps=steps))


def forget() -> None:
    """Drop the runs in memory, for tests of the store."""
    _read.cache_clear()
    _end.cache_clear()


def _strides(stride: int) -> dict[str, int]:
    """The buckets of each scalar: those of the quantities are coarser, if the store keeps them."""
    coarse = stride if stride < STORED_STRIDE else stride * COARSER
    hashes = {"data_hash": 1} if stride == 1 else {}
    return {"loss": stride, "tokens": stride, **hashes, **dict.fromkeys(SCALARS, coarse)}


def _joined(first: ScalarMeans, second: ScalarMeans) -> ScalarMeans:
    pairs = ((getattr(first, name), getattr(second, name)) for name in ("ends", "means", "last", "counts"))
    return ScalarMeans(*(np.concatenate(pair) for pair in pairs))


def _reading(means: Mapping[str, ScalarMeans]) -> RunReading:
    loss, tokens = means["loss"], means["tokens"]
    at = np.searchsorted(tokens.ends, loss.ends)
    is_complete = len(tokens) > 0 and bool((at < len(tokens)).all())
    # A bucket's tokens are those after its last step, so each of its losses needs them.
    is_complete = (
        is_complete
        and np.array_equal(tokens.ends[at], loss.ends)
        and bool((tokens.counts[at] >= loss.counts).all())
    )
    curve = LossCurve(
        steps=loss.ends,
        losses=loss.means,
        tokens=tokens.last[at] if is_complete else None,
        data_hash=_hashes(means),
    )
    return RunReading(curve, {name: means[name] for name in SCALARS if len(means[name])})


def _hashes(means: Mapping[str, ScalarMeans]) -> NDArray[np.float64] | None:
    """The hash of the batch of each loss, NaN where it is unknown; None for runs without hashes."""
    loss, hashes = means["loss"], means.get("data_hash")
    if hashes is None or not len(hashes):
        return None
    at = np.searchsorted(hashes.ends, loss.ends).clip(max=len(hashes) - 1)
    exact = (hashes.ends[at] == loss.ends) & (hashes.counts[at] == 1)
    return np.where(exact, hashes.means[at], np.nan)
