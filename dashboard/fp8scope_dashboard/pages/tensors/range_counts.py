"""The number of a run's tensors that leave their format's range, over steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors.saturation import SEARCH
from fp8scope_dashboard.alerts.models import Rule, RuleKind
from fp8scope_dashboard.pages.tensors.loading import columns_of
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import Heatmap

OVERFLOW: Final = "overflow_rate"
UNDERFLOW: Final = "underflow_rate"
# Answers that a process keeps, of some kilobytes each.
KEPT: Final = 64
_KINDS: Final = {OVERFLOW: RuleKind.SATURATION_RATE, UNDERFLOW: RuleKind.UNDERFLOW_RATE}


@dataclass(frozen=True, kw_only=True)
class RangeCounts:
    """Numbers of tensors in each column; NaN where none was observed.

    Attributes:
        edges: int64[C + 1]; column c holds the steps edges[c] <= step < edges[c + 1].
        observed: the most tensors that a column observed.
        overflow, underflow: float64[C], tensors whose rate reaches its limit in a step of the column.
        either: float64[C], tensors with one of them.
        limits: the limits that the rates were compared with.
    """

    edges: NDArray[np.int64]
    observed: int
    overflow: Floats
    underflow: Floats
    either: Floats
    limits: Mapping[str, float]


def limits_of(run: Run) -> dict[str, float]:
    """The limits of the rules for overflow and underflow: the run's own, else those of its project."""
    return _parameter(run, "rate")


def unjudged_steps(run: Run, statistic: str) -> int:
    """The number of first steps in which no alert is about this statistic, because scales are not settled."""
    if statistic == "nonfinite_rate":
        return SEARCH
    rule = OVERFLOW if statistic == "saturation_rate" else statistic
    return int(_parameter(run, "warmup")[rule]) if rule in _KINDS else 0


def _parameter(run: Run, parameter: str) -> dict[str, float]:
    values = {name: rules.validate(kind, {})[parameter] for name, kind in _KINDS.items()}
    stored = Rule.objects.filter(project=run.project_id, kind__in=_KINDS.values())
    # A rule of the run comes last, so that it counts.
    ordered = sorted(stored, key=lambda rule: rule.run_id is not None)
    for name, kind in _KINDS.items():
        for rule in ordered:
            if rule.kind == kind and rule.run_id in (None, run.pk):
                values[name] = float(rule.parameters.get(parameter, values[name]))
    return values


def read_counts(run: Run, *, first: int | None, last: int | None, columns: int) -> RangeCounts | None:
    """The counts over the steps first..last in at most `columns` columns; None without such statistics.

    Over many steps the first and the last column begin and end a little outside of the range. The counts are
    kept until the run has new rows: reloading a page, and zooming out again, reads nothing.
    """
    limits = limits_of(run)
    rows = (run.rows_stored, run.last_step, run.state)
    return _read_counts(run.pk, rows, first, last, columns, limits[OVERFLOW], limits[UNDERFLOW])


@lru_cache(maxsize=KEPT)
def _read_counts(
    run_id: UUID,
    rows: tuple[object, ...],
    first: int | None,
    last: int | None,
    columns: int,
    overflow_limit: float,
    underflow_limit: float,
) -> RangeCounts | None:
    """`rows` tells apart what the run had stored."""
    names = queries.statistic_names(run_id)
    # What is read for each of them.
    reads = {UNDERFLOW: UNDERFLOW, OVERFLOW: queries.overflow_name(names)}
    kinds = [name for name in _KINDS if reads[name] in names]
    if not kinds:
        return None
    tensors = list(Tensor.objects.filter(run=run_id).order_by("index").values_list("index", flat=True))
    columns = columns_of(run_id, len(tensors), first, last, columns)

    def read(name: str) -> Heatmap:
        return queries.heatmap(
            run_id, reads[name] or name, tensors=tensors, first=first, last=last, columns=columns, widen=True
        )

    heatmap = read(kinds[0])
    rates = {kinds[0]: heatmap.values}
    for name in kinds[1:]:
        # Rows that arrive between the two reads may bring steps.
        other = read(name)
        rates[name] = on_columns(other.values, other.step_edges, heatmap.step_edges)
    blank = np.full_like(heatmap.values, np.nan)
    overflow, underflow = (rates.get(name, blank) for name in (OVERFLOW, UNDERFLOW))
    limits = {OVERFLOW: overflow_limit, UNDERFLOW: underflow_limit}
    return counts_of(heatmap.step_edges, overflow, underflow, limits)


def on_columns(values: Floats, edges: NDArray[np.int64], wanted: NDArray[np.int64]) -> Floats:
    """Values float64[T, C] moved to other columns, by the first step of each; NaN where there is none."""
    column = np.searchsorted(edges, wanted[:-1], side="right") - 1
    inside = (column >= 0) & (column < values.shape[1])
    moved = np.full((len(values), len(column)), np.nan)
    moved[:, inside] = values[:, column[inside]]
    return moved


def counts_of(
    edges: NDArray[np.int64], overflow: Floats, underflow: Floats, limits: dict[str, float]
) -> RangeCounts:
    """The counts from the largest rates of each tensor in each column, float64[T, C]."""
    observed = (~np.isnan(overflow) | ~np.isnan(underflow)).sum(axis=0)
    with np.errstate(invalid="ignore"):
        over, under = overflow >= limits[OVERFLOW], underflow >= limits[UNDERFLOW]

    def counted(mask: NDArray[np.bool_]) -> Floats:
        return np.where(observed > 0, mask.sum(axis=0), np.nan)

    return RangeCounts(
        edges=edges,
        observed=int(observed.max(initial=0)),
        overflow=counted(over),
        underflow=counted(under),
        either=counted(over | under),
        limits=limits,
    )
