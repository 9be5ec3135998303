"""The ranking of a run's tensors: which left its range first, and which is worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from django.utils.safestring import SafeString
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.onset_search import Columns, TensorOnset, first_onsets, told_onsets
from fp8scope_dashboard.analysis.tensor_onsets import Ranked, is_rate
from fp8scope_dashboard.pages import formatting
from fp8scope_dashboard.pages.charts.sparkline import row_sparkline
from fp8scope_dashboard.pages.tensors.loading import of_tensors, overview
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
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
SPARK_POINTS: Final = 60


@dataclass(frozen=True, kw_only=True)
class RankedTensor:
    """One row of the ranking, prepared for the page. `onset` are steps in words; empty without an onset."""

    index: int
    name: str
    onset: str
    now: str
    ever: str
    change: str
    spark: SafeString


@dataclass(frozen=True, kw_only=True)
class TensorRanking:
    """All chosen tensors in order: `order` are positions in `indices`.

    Attributes:
        still: the number of tensors that are left out of `order`, because their rate was 0 in every step.
    """

    statistic: str
    limit: float
    heatmap: Heatmap
    indices: list[int]
    names: list[str]
    values: Floats
    facts: Ranked
    order: NDArray[np.intp]
    onsets: Mapping[int, TensorOnset]
    still: int = 0

    @property
    def total(self) -> int:
        """The number of observed tensors."""
        return len(self.order) + self.still

    def __len__(self) -> int:
        return len(self.order)

    @property
    def out_of_range(self) -> int:
        """The number of tensors with an onset."""
        return int((self.facts.onset >= 0).sum())

    def page(self, number: int) -> list[RankedTensor]:
        """The rows of a page, from 1."""
        return [self._row(i) for i in self.order[(number - 1) * ROWS_A_PAGE : number * ROWS_A_PAGE].tolist()]

    def _row(self, i: int) -> RankedTensor:
        onset = self.onsets.get(i)
        return RankedTensor(
            index=self.indices[i],
            name=self.names[i],
            onset="" if onset is None else onset.in_words,
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
    run: Run,
    statistic: str,
    indices: list[int],
    names: list[str],
    limit: float,
    sort: str = "onset",
    *,
    left_out: int = 0,
    everything: bool = False,
) -> TensorRanking:
    """Rank some tensors of a run, by Tensor.index, from one pass over the columns of its map.

    Args:
        indices, names: the tensors.
        limit: see analysis.tensor_onsets.default_limit.
        sort: one of SORTS.
        left_out: first steps of the run in which no onset is searched.
        everything: whether the tensors whose rate is always 0 are listed, even if they fill more than a page.
    """
    heatmap = overview(run, statistic)
    values = of_tensors(heatmap, indices)
    edges = heatmap.step_edges
    width = max(1, int(edges[-1] - edges[0]) // max(1, len(edges) - 1))
    columns = Columns(
        run_id=run.pk, statistic=statistic, indices=indices, edges=edges, values=values, left_out=left_out
    )
    first = first_onsets(columns, limit, recent=-(-RECENT_STEPS // width))
    told = told_onsets(run, statistic, limit)
    onsets = {**first.onsets, **{i: told[name] for i, name in enumerate(names) if name in told}}
    observed = np.flatnonzero(~np.isnan(values).all(axis=1))
    still = observed[:0]
    if is_rate(statistic) and not everything:
        still = observed[first.facts.ever[observed] == 0]
        if len(still) <= ROWS_A_PAGE:
            still = still[:0]
        observed = np.setdiff1d(observed, still)
    return TensorRanking(
        statistic=statistic,
        limit=limit,
        heatmap=heatmap,
        indices=indices,
        names=names,
        values=values,
        facts=first.facts,
        order=observed[_order(first.facts, onsets, observed, sort)],
        onsets=onsets,
        still=len(still),
    )


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
    if is_rate(statistic) or not len(seen):
        return row_sparkline(points, (-6.0, 0.0))
    return row_sparkline(points, (float(seen.min()), float(seen.max())))


def _thinned(values: Floats) -> Floats:
    """At most SPARK_POINTS, each the largest of its neighbours."""
    if len(values) <= SPARK_POINTS:
        return values
    starts = np.arange(SPARK_POINTS) * len(values) // SPARK_POINTS
    return np.asarray(np.fmax.reduceat(values, starts), np.float64)


def _order(
    facts: Ranked, onsets: Mapping[int, TensorOnset], observed: NDArray[np.intp], sort: str
) -> NDArray[np.intp]:
    """Positions in `observed`. Ties keep the order of the model."""
    worst = -np.nan_to_num(facts.ever[observed], nan=-np.inf)
    if sort == "onset":
        none = TensorOnset(np.iinfo(np.int64).max, None)
        step = [onsets.get(position, none).step for position in observed.tolist()]
        return np.lexsort((worst, np.array(step, np.int64)))
    key = {"now": facts.now, "ever": facts.ever, "change": np.abs(facts.change)}[sort][observed]
    return np.argsort(-np.nan_to_num(key, nan=-np.inf), kind="stable")
