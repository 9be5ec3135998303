"""The map of a run's tensors: the document that the browser draws."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.tensor_onsets import early_median, log2_change
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.pages.tensors import modes
from fp8scope_dashboard.pages.tensors.grouping import TensorGroup, VisibleRow, folded, opened_in, visible
from fp8scope_dashboard.pages.tensors.loading import detail, of_tensors, overview
from fp8scope_dashboard.pages.tensors.query import TensorQuery
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import Heatmap


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """Rows of groups and tensors over columns of steps.

    Attributes:
        rows: the visible rows; values float64[R, C] are theirs.
        step_edges: int64[C + 1].
        scale: of the colours.
        tensors: the number of tensors with a value.
    """

    rows: Sequence[VisibleRow]
    step_edges: NDArray[np.int64]
    values: Floats
    scale: modes.ColourScale
    indices: Sequence[int]
    tensors: int


def tensor_map(
    run: Run,
    tensors: Sequence[Tensor],
    question: TensorQuery,
    *,
    against: Run | None = None,
    first: int | None = None,
    last: int | None = None,
) -> TensorMap | None:
    """The map of some tensors in a range of steps; None if none of them has a value.

    Args:
        tensors: in the order of the model.
        against: the other run of the mode `difference`.
    """
    if not tensors:
        return None
    indices = [tensor.index for tensor in tensors]
    heatmap = _heatmap(run, question.statistic, indices, first, last)
    values = _shown(run, heatmap, tensors, question, against)
    seen = np.asarray(~np.isnan(values).all(axis=1))
    if not seen.any():
        return None
    if not seen.all():
        # Optimizer states, for example, have no overflow.
        tensors = [tensor for tensor, has_values in zip(tensors, seen.tolist(), strict=True) if has_values]
        indices = [tensor.index for tensor in tensors]
        values = values[seen]
    rows = visible(_folded(tensors, question), opened_in(question.open))
    signed = question.mode != "value"
    folded_values = modes.extremes(values, [row.group.positions for row in rows], signed=signed)
    return TensorMap(
        rows=rows,
        step_edges=heatmap.step_edges,
        values=folded_values,
        scale=_scale(values, question),
        indices=indices,
        tensors=len(tensors),
    )


def document(shown: TensorMap, question: TensorQuery, note: str) -> dict[str, Any]:
    """The map for the browser. `levels` is base64 of uint8[R, C], `values` of float32[R, C]."""
    return {
        "statistic": question.statistic,
        "title": glossary.title(question.statistic),
        "mode": question.mode,
        "note": note,
        "edges": shown.step_edges.tolist(),
        "rows": [
            {
                "key": row.group.key,
                "label": row.group.label,
                "short": row.short,
                "level": row.level,
                "tensors": len(row.group.positions),
                "open": None if row.group.is_tensor else row.is_open,
                "index": shown.indices[row.group.positions[0]] if row.group.is_tensor else None,
            }
            for row in shown.rows
        ],
        "tensors": shown.tensors,
        "levels": _encoded(modes.levels(shown.values, shown.scale)),
        "values": _encoded(shown.values.astype("<f4")),
        "signed": shown.scale.signed,
        "marks": list(shown.scale.marks),
        "colours": {name: {"heat": theme.heat, "cool": theme.cool} for name, theme in THEMES.items()},
    }


def table(shown: TensorMap) -> list[list[str | float | None]]:
    """The map as a table: a row for each row, a column for each column of steps; None without a value."""
    spans = zip(shown.step_edges[:-1].tolist(), (shown.step_edges[1:] - 1).tolist(), strict=True)
    head = ["tensor", *(str(low) if low == high else f"{low}-{high}" for low, high in spans)]
    rows: list[list[str | float | None]] = [
        [row.group.label, *(None if np.isnan(value) else float(f"{value:.6g}") for value in values)]
        for row, values in zip(shown.rows, shown.values.tolist(), strict=True)
    ]
    return [[*head], *rows]


def _folded(tensors: Sequence[Tensor], question: TensorQuery) -> tuple[TensorGroup, ...]:
    names, roles = [tensor.name for tensor in tensors], [tensor.role for tensor in tensors]
    return folded(names, roles, question.fold)


def _heatmap(run: Run, statistic: str, indices: list[int], first: int | None, last: int | None) -> Heatmap:
    if first is None and last is None:
        return without_gaps(overview(run, statistic))
    return without_gaps(detail(run, statistic, indices, first, last))


def without_gaps(heatmap: Heatmap) -> Heatmap:
    """Columns as wide as what usually lies between two observations, if that is more than one column.

    Statistics that are logged or sampled every 100 steps would else be stripes. A column shows the largest
    value of its steps, so wider columns say nothing that is not true.
    """
    seen = np.flatnonzero(~np.isnan(heatmap.values).all(axis=0))
    if len(seen) < 2 or np.median(np.diff(seen)) < 2:
        return heatmap
    width = int(np.ceil(np.quantile(np.diff(seen), 0.9)))
    starts = np.arange(0, heatmap.values.shape[1], width)
    edges = np.append(heatmap.step_edges[starts], heatmap.step_edges[-1])
    return replace(heatmap, step_edges=edges, values=np.fmax.reduceat(heatmap.values, starts, axis=1))


def _shown(
    run: Run, heatmap: Heatmap, tensors: Sequence[Tensor], question: TensorQuery, against: Run | None
) -> Floats:
    """Return what the mode makes of the values, float64[T, C]."""
    indices = [tensor.index for tensor in tensors]
    values = of_tensors(heatmap, indices)
    if question.mode == "change":
        reference = early_median(of_tensors(overview(run, question.statistic), indices))
        return log2_change(values, reference, question.statistic)
    if question.mode == "difference":
        other = _of_other(against, heatmap, [tensor.name for tensor in tensors], question.statistic)
        return modes.difference(values, other, question.statistic)
    return values


def _of_other(against: Run | None, heatmap: Heatmap, names: Sequence[str], statistic: str) -> Floats:
    """The values of the tensors with these names in another run, over the columns of the map."""
    empty = np.full((len(names), len(heatmap.step_edges) - 1), np.nan)
    if against is None or statistic not in queries.statistic_names(against.pk):
        return empty
    indices = dict(Tensor.objects.filter(run=against, name__in=names).values_list("name", "index"))
    if not indices or not empty.shape[1]:
        return empty
    first, last = int(heatmap.step_edges[0]), int(heatmap.step_edges[-1]) - 1
    other = detail(against, statistic, list(indices.values()), first, last)
    columns = modes.aligned(heatmap.step_edges, other.step_edges, other.values)
    rows = {index: row for row, index in enumerate(other.indices)}
    for i, name in enumerate(names):
        if name in indices:
            empty[i] = columns[rows[indices[name]]]
    return empty


def _scale(values: Floats, question: TensorQuery) -> modes.ColourScale:
    if question.mode == "change":
        return modes.scale_of_changes(values)
    if question.mode == "difference":
        return modes.scale_of_differences(values, question.statistic)
    return modes.scale_of_values(values, question.statistic)


def _encoded(values: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
