"""Query statistics of many tensors: over steps, at the last step, or by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.aggregates import FINEST, STRIDES
from fp8scope_dashboard.telemetry.codec import TENSOR, Float64s, Int64s
from fp8scope_dashboard.telemetry.coverage import cover
from fp8scope_dashboard.telemetry.rank_merge import DERIVED, Merged, across_ranks, derive, sources
from fp8scope_dashboard.telemetry.writers import step_range

# Cells (steps x tensors) of one statistic in memory at a time: 32 MB.
MAX_CELLS: Final = 4_000_000
# Up to this many tensors, only their names are read.
FEW_TENSORS: Final = 50
# The number of last steps that `top` covers.
RECENT_STEPS: Final = 100


@dataclass(frozen=True)
class Heatmap:
    """Tensors by steps.

    Attributes:
        names: the names of the T tensors.
        indices: their Tensor.index.
        step_edges: int64[C + 1]; column c holds the steps step_edges[c] <= step < step_edges[c + 1].
        values: float64[T, C], the largest value in each column; NaN if nothing was observed.
    """

    names: list[str]
    indices: list[int]
    step_edges: Int64s
    values: Float64s


@dataclass(frozen=True)
class Latest:
    """The statistics of all tensors at the last step that has any: float64[T] by statistic."""

    step: int
    names: list[str]
    values: dict[str, Float64s]


def statistic_names(run_id: UUID) -> list[str]:
    """The available tensor statistics of a run; see `available_statistics`."""
    return available_statistics(Run.objects.values_list("statistics", flat=True).get(pk=run_id))


def available_statistics(stored: Sequence[str]) -> list[str]:
    """The statistics of a run that has stored some (`Run.statistics`): the stored ones, then derived ones."""
    return [*stored, *(name for name in DERIVED if set(sources(name)) <= set(stored))]


def overflow_name(names: Sequence[str]) -> str | None:
    """The statistic that shows overflow in a run with these statistics, if any.

    Overflow is saturated and non-finite elements. A client that does not count the second, which docs/wire.md
    does not ask for, has the rate of the first.
    """
    return next((name for name in ("overflow_rate", "saturation_rate") if name in names), None)


def heatmap(
    run_id: UUID,
    statistic: str,
    *,
    tensors: Sequence[int] | None = None,
    first: int | None = None,
    last: int | None = None,
    columns: int = 400,
    widen: bool = False,
) -> Heatmap:
    """The largest value of a statistic, stored or derived, by tensor and column of neighbouring steps.

    Covers the steps first..last (inclusive; all stored steps by default) in at most `columns` columns of
    similar width; over many steps, a column consists of whole roll-up buckets. With `widen`, so do the first
    and the last one, which then begin and end a little outside: no rows have to be read. Tensors keep the
    order of `tensors` (by default all, by index); unknown ones are left out.

    Raises:
        ValueError: `columns` is not positive.
    """
    if columns < 1:
        raise ValueError(f"columns must be positive, not {columns}")
    names = _tensor_names(run_id, tensors)
    indices = [i for i in (names if tensors is None else tensors) if i in names]
    stored = step_range(run_id)
    if stored is None or not indices:
        return Heatmap(
            [names[i] for i in indices], indices, np.zeros(1, np.int64), np.zeros((len(indices), 0))
        )
    low = stored[0] if first is None else max(first, stored[0])
    high = max(low, stored[1] if last is None else min(last, stored[1]))
    stride = _stride(high - low + 1, columns)
    if widen and stride is not None:
        low = max(stored[0], low // stride * stride)
        high = min(stored[1], -(-(high + 1) // stride) * stride - 1)
    edges = _edges(low, high, columns, stride)
    values = np.full((len(indices), len(edges) - 1), np.nan)
    # A run has no rows beyond its ends, so the buckets at the ends are used whole.
    begin = low // FINEST * FINEST if low == stored[0] else low
    end = -(-(high + 1) // FINEST) * FINEST - 1 if high == stored[1] else high
    column = TENSOR + statistic
    coverage = cover(run_id, [column], np.array(indices), ("max",), begin, end, stride)
    for rolled in coverage.rolled:
        steps = np.clip((rolled.first + np.arange(len(rolled.covered))) * rolled.stride, low, high)
        _fill(values, edges, steps[rolled.covered], rolled.values[column]["max"][:, rolled.covered])
    for raw_first, raw_last in coverage.raw:
        _fill_raw(run_id, statistic, indices, values, edges, max(raw_first, low), min(raw_last, high))
    return Heatmap([names[i] for i in indices], indices, edges, values)


def latest_statistics(run_id: UUID) -> Latest | None:
    """All statistics of all tensors at the last observed step; None if there is none."""
    stored = step_range(run_id)
    names = _tensor_names(run_id, None)
    recorded = Run.objects.values_list("statistics", flat=True).get(pk=run_id)
    if stored is None or not names or not recorded:
        return None
    high, width = stored[1], 16
    while high >= stored[0]:
        merged = _merged(run_id, recorded, list(names), high - width + 1, high)
        if merged is not None:
            some = np.any([~np.isnan(array).all(axis=0) for array in merged.values.values()], axis=0)
            if some.any():
                row = merged.rows(np.flatnonzero(some)[-1:])
                values = {name: derive(name, row.values)[:, 0] for name in statistic_names(run_id)}
                return Latest(int(row.steps[0]), list(names.values()), values)
        high, width = high - width, width * 4
    return None


def top(run_id: UUID, statistic: str, k: int = 10) -> list[tuple[int, str, float]]:
    """The k tensors (index, name, value) with the largest value of a statistic in the last 100 steps."""
    stored = step_range(run_id)
    if stored is None:
        return []
    recent = heatmap(run_id, statistic, first=stored[1] - RECENT_STEPS + 1, columns=1)
    observed = np.flatnonzero(~np.isnan(recent.values).all(axis=1))
    ranked = observed[np.argsort(-recent.values[observed, 0], kind="stable")][:k]
    return [(recent.indices[i], recent.names[i], float(recent.values[i, 0])) for i in ranked]


def by_rank(run_id: UUID, statistic: str, tensors: Int64s, step: int) -> dict[int, Float64s]:
    """A stored statistic of some tensors at one step, not merged: float64[T] by rank, NaN if not observed.

    `tensors` are Tensor.index values. If a rank has several writers, the most authoritative one counts.
    Ranks without the step are left out.
    """
    chosen: dict[int, tuple[int, Float64s]] = {}
    for part in rows.tensor_parts(run_id, (statistic,), tensors, (step, step)):
        values = part.values[statistic]
        if values.shape[1] and (part.rank not in chosen or part.order < chosen[part.rank][0]):
            chosen[part.rank] = part.order, np.asarray(values[:, -1], np.float64)
    return {rank: values for rank, (_, values) in sorted(chosen.items())}


def _stride(steps: int, columns: int) -> int | None:
    """The largest stride with a bucket for each column; None if there are too few steps."""
    fitting = [stride for stride in STRIDES if steps >= stride * columns]
    return fitting[-1] if fitting and columns > 1 else None


def _edges(low: int, high: int, columns: int, stride: int | None) -> Int64s:
    count = min(columns, high - low + 1)
    edges = low + np.arange(count + 1) * (high - low + 1) // count
    if stride is not None:
        edges[1:-1] = (edges[1:-1] + stride // 2) // stride * stride
    return edges


def _fill_raw(
    run_id: UUID, statistic: str, indices: list[int], values: Float64s, edges: Int64s, first: int, last: int
) -> None:
    """Fill columns with the rows of steps first..last, a limited number of columns at a time."""
    column = int(np.searchsorted(edges, first, side="right")) - 1
    final = int(np.searchsorted(edges, last, side="right")) - 1
    while column <= final:
        limit = edges[column] + MAX_CELLS // len(indices)
        after = max(column + 1, min(int(np.searchsorted(edges, limit, side="right")) - 1, final + 1))
        begin, end = max(first, int(edges[column])), min(last, int(edges[after]) - 1)
        merged = _merged(run_id, sources(statistic), indices, begin, end)
        if merged is not None and len(merged.steps):
            _fill(values, edges, merged.steps, derive(statistic, merged.values))
        column = after


def _fill(values: Float64s, edges: Int64s, steps: Int64s, rows: Float64s) -> None:
    """Put the largest row of each column, float64[T, N] by increasing step, into values, float64[T, C]."""
    if not len(steps):
        return
    column = np.searchsorted(edges, steps, side="right") - 1
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    filled = column[starts]
    values[:, filled] = np.fmax(values[:, filled], np.fmax.reduceat(rows, starts, axis=1))


def _merged(run_id: UUID, names: Sequence[str], tensors: list[int], first: int, last: int) -> Merged | None:
    return across_ranks(rows.tensor_parts(run_id, names, np.array(tensors), (first, last)))


def _tensor_names(run_id: UUID, tensors: Sequence[int] | None) -> dict[int, str]:
    """Names by index; perhaps of more tensors than those asked for."""
    rows = Tensor.objects.filter(run_id=run_id).order_by("index")
    # A query of many parameters takes longer than the names.
    if tensors is not None and len(tensors) <= FEW_TENSORS:
        rows = rows.filter(index__in=tensors)
    return dict(rows.values_list("index", "name"))
