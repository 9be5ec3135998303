"""The ranking of a run's tensors: which left its range first, and which is worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from django.utils.html import format_html
from django.utils.safestring import SafeString
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.tensor_onsets import Ranked, is_rate, ranked, tensor_limits
from fp8scope_dashboard.pages import formatting
from fp8scope_dashboard.pages.tensors.loading import of_tensors, overview
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import Heatmap
from fp8scope_dashboard.text.numbers import THIN

SORTS: Final[Mapping[str, str]] = {
    "onset": "First sustained onset",
    "now": "Worst now",
    "ever": "Worst ever",
    "change": "Changed most",
}
ROWS_A_PAGE: Final = 25
# `now` is at least this many last steps.
RECENT_STEPS: Final = 100
# Onsets in this many of the earliest columns are searched step by step, over at most this many cells (steps x
# tensors) each.
EXACT_COLUMNS: Final = 4
MOST_CELLS: Final = 2_000_000
SPARK_WIDTH, SPARK_HEIGHT, SPARK_POINTS = 120, 22, 60


@dataclass(frozen=True, kw_only=True)
class RankedTensor:
    """One row of the ranking, prepared for the page. `onset` and `until` are steps; None without an onset."""

    index: int
    name: str
    onset: int | None
    until: int | None
    now: str
    ever: str
    change: str
    spark: SafeString

    @property
    def is_exact(self) -> bool:
        return self.onset == self.until


@dataclass(frozen=True, kw_only=True)
class TensorRanking:
    """All chosen tensors in order: `order` are positions in `indices`."""

    statistic: str
    limit: float
    heatmap: Heatmap
    indices: list[int]
    names: list[str]
    values: Floats
    facts: Ranked
    order: NDArray[np.intp]
    exact: Mapping[int, int]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def out_of_range(self) -> int:
        """The number of tensors with an onset."""
        return int((self.facts.onset >= 0).sum())

    @property
    def first_onset(self) -> int | None:
        """The step of the earliest onset; None without one."""
        with_onset = [i for i in range(len(self.indices)) if self.facts.onset[i] >= 0]
        steps = (self.exact.get(i, int(self.heatmap.step_edges[self.facts.onset[i]])) for i in with_onset)
        return min(steps, default=None)

    def page(self, number: int) -> list[RankedTensor]:
        """The rows of a page, from 1."""
        return [self._row(i) for i in self.order[(number - 1) * ROWS_A_PAGE : number * ROWS_A_PAGE].tolist()]

    def _row(self, i: int) -> RankedTensor:
        column, edges = int(self.facts.onset[i]), self.heatmap.step_edges
        onset = until = None
        if i in self.exact:
            onset = until = self.exact[i]
        elif column >= 0:
            onset, until = int(edges[column]), int(edges[column + 1]) - 1
        return RankedTensor(
            index=self.indices[i],
            name=self.names[i],
            onset=onset,
            until=until,
            now=shown(self.facts.now[i], self.statistic),
            ever=shown(self.facts.ever[i], self.statistic),
            change=self._change(i),
            spark=spark(self.values[i], self.statistic),
        )

    def _change(self, i: int) -> str:
        """Of a rate both ends: a factor from almost nothing says little. Of other statistics the factor."""
        if not is_rate(self.statistic) or np.isnan(self.facts.change[i]):
            return shown_change(float(self.facts.change[i]))
        before, after = (shown(shares[i], self.statistic) for shares in (self.facts.before, self.facts.after))
        return f"{before} → {after}" if before != after else "no change"


def rank(
    run: Run, statistic: str, indices: list[int], names: list[str], limit: float, sort: str = "onset"
) -> TensorRanking:
    """Rank some tensors of a run, by Tensor.index, from one pass over the columns of its map.

    Args:
        indices, names: the tensors.
        limit: see analysis.tensor_onsets.default_limit.
        sort: one of SORTS.
    """
    heatmap = overview(run, statistic)
    values = of_tensors(heatmap, indices)
    edges = heatmap.step_edges
    width = max(1, int(edges[-1] - edges[0]) // max(1, len(edges) - 1))
    facts = ranked(values, statistic, limit, recent=-(-RECENT_STEPS // width))
    exact = exact_onsets(run, statistic, indices, edges, facts, limit) if is_rate(statistic) else {}
    observed = np.flatnonzero(~np.isnan(values).all(axis=1))
    return TensorRanking(
        statistic=statistic,
        limit=limit,
        heatmap=heatmap,
        indices=indices,
        names=names,
        values=values,
        facts=facts,
        order=observed[_order(facts, exact, edges, observed, sort)],
        exact=exact,
    )


def exact_onsets(
    run: Run, statistic: str, indices: list[int], edges: NDArray[np.int64], facts: Ranked, limit: float
) -> dict[int, int]:
    """The first step over the limit, by position, of the tensors with the earliest onsets.

    Several tensors may leave their range in one column of many steps. Those of the first columns with an
    onset are read again, step by step; where retention has left only roll-ups, they keep the column.
    """
    exact: dict[int, int] = {}
    limits = tensor_limits(facts.before, statistic, limit)
    columns = np.unique(facts.onset[facts.onset >= 0])[:EXACT_COLUMNS]
    for column in columns.tolist():
        low, high = int(edges[column]), int(edges[column + 1]) - 1
        positions = np.flatnonzero(facts.onset == column)[: MOST_CELLS // (high - low + 1)].tolist()
        tensors = [indices[i] for i in positions]
        finer = queries.heatmap(
            run.pk, statistic, tensors=tensors, first=low, last=high, columns=high - low + 1
        )
        rows = of_tensors(finer, tensors)
        for i, row in zip(positions, rows, strict=True):
            over = np.flatnonzero(row > limits[i])
            if len(over) and finer.step_edges[over[0] + 1] - finer.step_edges[over[0]] == 1:
                exact[i] = int(finer.step_edges[over[0]])
    return exact


def shown(value: float, statistic: str) -> str:
    """A value of a statistic as people read it."""
    if np.isnan(value):
        return formatting.NOTHING
    return formatting.percent(float(value)) if is_rate(statistic) else formatting.number(float(value))


def shown_change(change: float) -> str:
    """A log2 change as a factor: × 8, ÷ 3.2, × 1."""
    if np.isnan(change):
        return formatting.NOTHING
    size = 2.0 ** abs(change)
    factor = formatting.number(size, 2 if size < 100 else 3)
    return f"{'÷' if change < 0 and factor != '1' else '×'}{THIN}{factor}"


def spark(values: Floats, statistic: str) -> SafeString:
    """The columns of a tensor as a small line: rates from 10⁻⁶ to 1, others over their own range."""
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.log10(np.maximum(values, 1e-6) if is_rate(statistic) else values)
    points = _thinned(np.where(np.isfinite(levels), levels, np.nan))
    seen = points[~np.isnan(points)]
    if not len(seen):
        return SafeString("")
    low, high = (-6.0, 0.0) if is_rate(statistic) else (float(seen.min()), float(seen.max()))
    share = (points - low) / ((high - low) or 1.0)
    across = np.arange(len(points)) / max(1, len(points) - 1) * SPARK_WIDTH
    path, pen = [], "M"
    for x, y in zip(across, share, strict=True):
        if np.isnan(y):
            continue
        path.append(f"{pen}{x:.1f} {1 + (1 - y) * (SPARK_HEIGHT - 2):.1f}")
        pen = "L"
    return format_html(
        '<svg class="tspark" viewBox="0 0 {} {}" aria-hidden="true"><path d="{}"/></svg>',
        SPARK_WIDTH,
        SPARK_HEIGHT,
        "".join(path),
    )


def _thinned(values: Floats) -> Floats:
    """At most SPARK_POINTS, each the largest of its neighbours."""
    if len(values) <= SPARK_POINTS:
        return values
    starts = np.arange(SPARK_POINTS) * len(values) // SPARK_POINTS
    return np.asarray(np.fmax.reduceat(values, starts), np.float64)


def _order(
    facts: Ranked,
    exact: Mapping[int, int],
    edges: NDArray[np.int64],
    observed: NDArray[np.intp],
    sort: str,
) -> NDArray[np.intp]:
    """Positions in `observed`. Ties keep the order of the model."""
    worst = -np.nan_to_num(facts.ever[observed], nan=-np.inf)
    if sort == "onset":
        onset = facts.onset[observed]
        step = np.where(onset >= 0, edges[np.maximum(onset, 0)], np.iinfo(np.int64).max)
        for position, i in enumerate(observed.tolist()):
            step[position] = exact.get(i, step[position])
        return np.lexsort((worst, step))
    key = {"now": facts.now, "ever": facts.ever, "change": np.abs(facts.change)}[sort][observed]
    return np.argsort(-np.nan_to_num(key, nan=-np.inf), kind="stable")
