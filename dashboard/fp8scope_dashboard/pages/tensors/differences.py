"""The difference of a tensor statistic between two runs, by tensor and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.tensor_onsets import is_rate
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries

COLUMNS: Final = 160
# Tensors in the map: those that differ most.
MAX_ROWS: Final = 60
# Statistics that are compared, the most telling first; others follow by name.
PREFERRED: Final = ("overflow_rate", "underflow_rate", "amax", "scale", "noise_to_signal", "subnormal_rate")
# Counts depend on the number of elements and ranks; their rates are compared instead.
LEFT_OUT: Final = frozenset(
    {"numel", "saturated", "nonfinite", "underflow", "subnormal", "blocks", "saturated_blocks"}
)
# To find the statistic that differs most: the most telling ones, in few columns.
MAX_STATISTICS, FEW_COLUMNS = 8, 24
# The limit of the default rules of saturation.
RATE: Final = 1e-3
# A value that is zero in only one of two runs: as far as this many powers of two.
FARTHEST: Final = 24.0


@dataclass(frozen=True, kw_only=True)
class DifferenceMap:
    """The largest values of run B against those of run A.

    Attributes:
        names: of T tensors that both runs have and that differ, those that differ most first.
        step_edges: int64[C + 1]; column c holds the steps step_edges[c] <= step < step_edges[c + 1].
        values: float64[T, C], B - A for rates, else log2(B / A); NaN where one of them has no value.
        is_rate: which of the two.
        compared: tensors that both runs have. different: those of them that differ anywhere.
    """

    names: list[str]
    step_edges: NDArray[np.int64]
    values: Floats
    is_rate: bool
    compared: int
    different: int


def common_statistics(first: Run, second: Run) -> list[str]:
    """The statistics that both runs have, the most telling first."""
    names = set(queries.statistic_names(first.pk)) & set(queries.statistic_names(second.pk))
    preferred = [name for name in PREFERRED if name in names]
    return preferred + sorted(names - set(preferred) - LEFT_OUT)


def difference_map(
    a: Run,
    b: Run,
    statistic: str,
    *,
    first: int | None = None,
    last: int | None = None,
    columns: int = COLUMNS,
) -> DifferenceMap | None:
    """Compare two runs over the steps that both have; None if there are none, or no common tensors."""
    ranges = [queries.step_range(run.pk) for run in (a, b)]
    if ranges[0] is None or ranges[1] is None:
        return None
    low = max(ranges[0][0], ranges[1][0], first if first is not None else 0)
    high = min(ranges[0][1], ranges[1][1], *(() if last is None else (last,)))
    if high < low:
        return None
    # With equal bounds the columns of both maps have equal edges.
    maps = [queries.heatmap(run.pk, statistic, first=low, last=high, columns=columns) for run in (a, b)]
    rows = [{name: i for i, name in enumerate(tensor_map.names)} for tensor_map in maps]
    names = [name for name in maps[0].names if name in rows[1]]
    if not names or not np.array_equal(maps[0].step_edges, maps[1].step_edges):
        return None
    ours = maps[0].values[[rows[0][name] for name in names]]
    theirs = maps[1].values[[rows[1][name] for name in names]]
    values = compared(ours, theirs, subtract=is_rate(statistic))
    chosen = most_different(values, MAX_ROWS)
    return DifferenceMap(
        names=[names[i] for i in chosen],
        step_edges=maps[0].step_edges,
        values=values[chosen],
        is_rate=is_rate(statistic),
        compared=len(names),
        different=len(most_different(values, len(names))),
    )


def most_different_statistic(
    a: Run, b: Run, statistics: Sequence[str], *, first: int | None = None, last: int | None = None
) -> str:
    """The statistic in which a tensor differs most, and not only for a while; of none, the first.

    Rates are counted in the limit of the default rule, others in factors of two.
    """
    sizes: dict[str, float] = {}
    for statistic in statistics[:MAX_STATISTICS]:
        differs = difference_map(a, b, statistic, first=first, last=last, columns=FEW_COLUMNS)
        if differs is not None:
            sizes[statistic] = lasting_difference(differs.values) / (RATE if differs.is_rate else 1.0)
    return max(sizes, key=lambda name: sizes[name]) if sizes else statistics[0]


def lasting_difference(values: Floats) -> float:
    """The largest difference of a row of float64[T, C] that lasts: always, or in the last half or quarter.

    It is the magnitude of a median, so that spikes and fluctuations do not count. NaN is no value.
    """
    columns = values.shape[1]
    lasting = 0.0
    for part in (values, values[:, columns // 2 :], values[:, 3 * columns // 4 :]):
        seen = part[~np.isnan(part).all(axis=1)]
        if seen.size:
            lasting = max(lasting, float(np.max(np.abs(np.nanmedian(seen, axis=1)))))
    return lasting


def compared(a: Floats, b: Floats, *, subtract: bool) -> Floats:
    """b - a, or log2(b / a) of the magnitudes within ±FARTHEST; equal values, of them two zeros, are 0."""
    if subtract:
        return np.asarray(b - a)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(np.abs(b)) - np.log2(np.abs(a))
    ratio = np.where((a == b) & ~np.isnan(a), 0.0, ratio)
    return np.asarray(np.clip(ratio, -FARTHEST, FARTHEST))


def most_different(values: Floats, most: int) -> Sequence[int]:
    """The rows of float64[T, C] with the largest magnitude, the largest first.

    Rows without a difference are left out.
    """
    size = np.max(np.abs(np.where(np.isnan(values), 0.0, values)), axis=1, initial=0.0)
    order = np.argsort(-size, kind="stable")
    return [int(i) for i in order[:most] if size[i] > 0]
