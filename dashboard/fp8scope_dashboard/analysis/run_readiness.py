"""Read what is stored of a run's tensors in a sampled step, for `analysis.what_if`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.analysis.what_if.distribution import Distribution
from fp8scope_dashboard.analysis.what_if.targets import Tensors
from fp8scope_dashboard.runs.models import Tensor
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.text.numbers import count

# The tensors that a layer quantises; what an optimizer keeps is no operand of a product.
ROLES: Final = ("input", "weight", "grad_output")
# The history of delayed scaling, in steps: the default of the recipe.
HISTORY: Final = 16


@dataclass(frozen=True)
class Sampled:
    """The tensors of a run in one sampled step. `indices`: Tensor.index of each."""

    step: int
    indices: list[int]
    tensors: Tensors


def sampled_tensors(run_id: UUID, step: int | None = None) -> Sampled | None:
    """The operands in the last sampled step, at or before `step` if given; None if there is none."""
    stored = queries.step_histograms(run_id, step)
    if stored is None:
        return None
    rows = {index: i for i, index in enumerate(stored.tensors.tolist())}
    catalogued = [
        tensor
        for tensor in Tensor.objects.filter(run_id=run_id, role__in=ROLES).order_by("index")
        if tensor.index in rows
    ]
    if not catalogued:
        return None
    indices = [tensor.index for tensor in catalogued]
    counts = stored.counts[[rows[index] for index in indices]]
    # Roll-ups have the largest amax of several steps.
    is_raw = stored.step >= queries.raw_from(run_id)
    amax = _largest_amax(run_id, indices, stored.step, stored.step) if is_raw else None
    return Sampled(
        stored.step,
        indices,
        Tensors(
            [tensor.name for tensor in catalogued],
            [tensor.role for tensor in catalogued],
            Distribution.of(counts, amax),
            np.array([_columns(tensor) for tensor in catalogued]),
            _largest_amax(run_id, indices, stored.step - HISTORY, stored.step - 1),
        ),
    )


def missing_roles(run_id: UUID, step: int | None = None) -> str:
    """The sentence about histograms that cannot be judged, because no tensor has a role; else empty."""
    stored = queries.step_histograms(run_id, step)
    if stored is None:
        return ""
    sampled = count(len(stored.tensors), "tensor")
    return (
        f"The run has the exponents of {sampled}, but none of them has the role input, weight or "
        "grad_output, which says what a product quantises. The client sends it as `role` with the name of a "
        "tensor."
    )


def _largest_amax(run_id: UUID, indices: list[int], first: int, last: int) -> Floats:
    """The largest amax of each tensor in these steps, float64[T]; NaN where there is none or it is 0."""
    stored = queries.step_range(run_id)
    if stored is None or last < stored[0] or first > stored[1]:
        return np.full(len(indices), np.nan)
    values = queries.heatmap(run_id, "amax", tensors=indices, first=first, last=last, columns=1).values
    amax = values[:, 0] if values.shape[1] else np.full(len(indices), np.nan)
    return np.where(amax > 0, amax, np.nan)


def _columns(tensor: Tensor) -> float:
    """The elements of a row: the last size of the shape; 0 if it is unknown."""
    size = tensor.shape[-1] if tensor.shape else 0
    return float(max(size, 0)) if isinstance(size, int) else 0.0
