"""Since when an amax grows: by the definition of the ranking of tensors, so that both name the same step.

The detector sees that a level has grown by its limit, long after the growth began. When its alert opens, the
first step at which the tensor had left the range of its beginning is searched in the store. Rows that arrive
later would move the median of that beginning, so the alert keeps what was found, and the ranking shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.alerts.detectors import ConditionChange
from fp8scope_dashboard.alerts.kinds.tensors import AMAX_GROWTH
from fp8scope_dashboard.alerts.models import Rule
from fp8scope_dashboard.analysis.onset_search import (
    COLUMNS,
    RANKED,
    Columns,
    FirstOnsets,
    TensorOnset,
    first_onsets,
)
from fp8scope_dashboard.analysis.tensor_onsets import SUSTAINED, WINDOW, default_limit, over_limit
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.text.onsets import steps_in_words

# Of the columns since the onset, this share must be over the limit: a growth that ended is another one.
LASTING: Final = SUSTAINED / WINDOW


def since_it_grew(run: Run, rule: Rule, finding: ConditionChange) -> ConditionChange:
    """The finding with the onsets of its tensors in the ranking, where these are earlier."""
    if rule.kind != AMAX_GROWTH.name or not finding.opened or not finding.evidence.get("tensors"):
        return finding
    named = [*finding.evidence["tensors"], finding.evidence["first"]]
    onsets = _onsets(run, {str(entry["name"]) for entry in named}, finding.step, _warmup(run, rule))
    tensors = [_earlier(entry, onsets) for entry in finding.evidence["tensors"]]
    before = finding.evidence["first"]
    first = min([_earlier(before, onsets), *tensors], key=lambda entry: int(entry["onset_step"]))
    first = {name: first[name] for name in ("name", "onset_step", "after_step", RANKED) if name in first}
    message = finding.message.replace(_since(before), _since(first), 1)
    return replace(
        finding, message=message, evidence={**finding.evidence, "tensors": tensors, "first": first}
    )


def _warmup(run: Run, rule: Rule) -> int:
    """The first step of the run whose growth the rule counts."""
    stored = queries.step_range(run.pk)
    return (stored[0] if stored else 0) + int(rule.parameters.get("warmup", 0))


def _since(first: Mapping[str, Any]) -> str:
    words = steps_in_words(int(first["onset_step"]), int(first["after_step"]))
    return f"step {words}"


def _earlier(entry: Mapping[str, Any], onsets: Mapping[str, TensorOnset]) -> dict[str, Any]:
    onset = onsets.get(str(entry["name"]))
    if onset is None or onset.step > int(entry["onset_step"]):
        return dict(entry)
    statistic = AMAX_GROWTH.shows
    since = {"onset_step": onset.step, "after_step": -1 if onset.after is None else onset.after}
    return {**entry, **since, RANKED: [statistic, default_limit(statistic)]}


def _onsets(run: Run, names: set[str], last: int, begins: int) -> dict[str, TensorOnset]:
    """The onsets of tensors in the ranking, as of step `last`, of changes that have lasted since."""
    statistic = AMAX_GROWTH.shows
    by_index = dict(Tensor.objects.filter(run=run, name__in=names).values_list("index", "name"))
    read = queries.heatmap(run.pk, statistic, tensors=sorted(by_index), last=last, columns=COLUMNS)
    columns = Columns(
        run_id=run.pk, statistic=statistic, indices=read.indices, edges=read.step_edges, values=read.values
    )
    first = first_onsets(columns, default_limit(statistic))
    return {
        by_index[columns.indices[position]]: onset
        for position, onset in first.onsets.items()
        if onset.step >= begins and _lasts(columns, first, position)
    }


def _lasts(columns: Columns, first: FirstOnsets, position: int) -> bool:
    """True if a tensor has stayed over the limit since its onset."""
    row = columns.values[position : position + 1, first.facts.onset[position] :]
    seen = ~np.isnan(row)
    over = over_limit(
        row, first.facts.before[[position]], columns.statistic, default_limit(columns.statistic)
    )
    return bool(over[seen].mean() >= LASTING)
