"""Read what comparisons need of a run, bounded for runs of any length.

A curve of up to MOST_POINTS steps is read step by step. A longer one comes as means over fixed buckets of
2^k steps. Buckets of 64 steps and more are kept by the telemetry store, which brings them up to date after
resumed attempts, rewinds, late and duplicate rows. A bucket with a NaN is NaN, and one with an infinite loss
is infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.analysis.alignment import Curve
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import ScalarMeans

MOST_POINTS: Final = 16_384
"""A curve has at most this many points, in the range that is compared."""
STORED_STRIDE: Final = 64
"""The smallest buckets that the store keeps."""
SCALARS: Final = ("grad_norm", "tokens_per_second", "step_seconds", "memory_peak", "memory_reserved")
"""Read together with the loss, for the quantities."""


@dataclass(frozen=True)
class Reading:
    """A run as a comparison reads it: its loss curve, and the other scalars in the same buckets."""

    curve: Curve
    scalars: Mapping[str, ScalarMeans]


def stride_of(steps: int) -> int:
    """Steps per bucket of a curve of this many steps: a power of two, 1 for short curves.

    Buckets between 2 and 64 steps would be computed from all rows each time, so only those of 2 are used.
    """
    stride = 1
    while steps > MOST_POINTS * stride:
        stride = stride * 2 if stride != 2 else STORED_STRIDE
    return stride


def read_curve(run_id: UUID) -> Curve:
    """A run's loss, with tokens if it logs them wherever it logs a loss."""
    return read_run(run_id).curve


def read_arms(ours: Sequence[UUID], theirs: Sequence[UUID]) -> tuple[list[Reading], list[Reading]]:
    """The runs of two arms. Buckets are equal in the range that the first run and the baseline share.

    The buckets follow from that range, so that a short run is compared step by step with a long baseline.
    """
    ends = {run_id: _end(run_id) for run_id in {*ours, *theirs}}
    shared = min(ends[ours[0]], max((ends[run_id] for run_id in theirs), default=0))
    readings = {run_id: _read(run_id, shared, ends[run_id]) for run_id in ends}
    return [readings[run_id] for run_id in ours], [readings[run_id] for run_id in theirs]


def read_run(run_id: UUID) -> Reading:
    """One run by itself."""
    end = _end(run_id)
    return _read(run_id, end, end)


def _end(run_id: UUID) -> int:
    steps = queries.step_range(run_id)
    return 0 if steps is None else steps[1]


def _read(run_id: UUID, shared: int, end: int) -> Reading:
    """Fine buckets up to the step `shared`, and coarser ones behind it if the run goes on for long."""
    names = ("loss", "tokens", *SCALARS)
    near, far = stride_of(shared), stride_of(end)
    border = -(-(shared + 1) // far) * far
    if near == far or border > end:
        return _reading(queries.scalar_means(run_id, names, near))
    parts = (
        queries.scalar_means(run_id, names, near, last=border - 1),
        queries.scalar_means(run_id, names, far, first=border),
    )
    return _reading({name: _joined(parts[0][name], parts[1][name]) for name in names})


def _joined(first: ScalarMeans, second: ScalarMeans) -> ScalarMeans:
    pairs = ((getattr(first, name), getattr(second, name)) for name in ("ends", "means", "last", "counts"))
    return ScalarMeans(*(np.concatenate(pair) for pair in pairs))


def _reading(means: Mapping[str, ScalarMeans]) -> Reading:
    loss, tokens = means["loss"], means["tokens"]
    at = np.searchsorted(tokens.ends, loss.ends)
    known = len(tokens) > 0 and bool((at < len(tokens)).all())
    # A bucket's tokens are those after its last step, so each of its losses needs them.
    known = (
        known
        and np.array_equal(tokens.ends[at], loss.ends)
        and bool((tokens.counts[at] >= loss.counts).all())
    )
    curve = Curve(loss.ends, loss.means, tokens.last[at] if known else None)
    return Reading(curve, {name: means[name] for name in SCALARS if len(means[name])})
