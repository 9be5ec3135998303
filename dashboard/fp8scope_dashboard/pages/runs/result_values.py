"""Settings and results of runs, as positions of charts: numbers, or texts in a fixed order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from django.db.models import TextField
from django.db.models.functions import Cast

from fp8scope_dashboard.pages.charts.arms import precision_label
from fp8scope_dashboard.pages.formatting import number
from fp8scope_dashboard.pages.runs.columns import RunColumn, column_named
from fp8scope_dashboard.pages.runs.listing import Listing, entries_of, entry_values, with_entries
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search.fields import text_of
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import NON_FINITE

MAX_RUNS: Final = 1_000
MAX_TEXTS: Final = 12
TEXT_LENGTH: Final = 24
# The newest runs and configuration keys among which settings that differ are looked for.
SAMPLED_RUNS: Final = 100
SAMPLED_KEYS: Final = 80
# Positive numbers that span more than this are drawn on a logarithmic axis.
WIDE: Final = 50.0
RESULTS: Final = ("loss", "difference", "step", "duration")
SETTINGS: Final = ("precision", "recipe", "group", "seed", "state")


@dataclass(frozen=True, kw_only=True)
class ValueAxis:
    """The values of one setting or result of the runs of a chart.

    Attributes:
        positions: float64[runs]; NaN where a run has no value. Of texts, the position of the text in `texts`.
        texts: the different texts in the order of the axis; empty if the values are numbers.
    """

    title: str
    positions: Floats
    texts: tuple[str, ...] = ()

    @property
    def is_log(self) -> bool:
        """Return whether the axis is logarithmic."""
        finite = self.positions[np.isfinite(self.positions)]
        if self.texts or not len(finite) or finite.min() <= 0:
            return False
        return bool(finite.max() / finite.min() > WIDE)

    def label(self, index: int) -> str:
        """The value of a run, for people."""
        position = self.positions[index]
        if not np.isfinite(position):
            return "–"
        return self.texts[int(position)] if self.texts else number(float(position))


def plotted(key: str) -> RunColumn | None:
    """The column of a key that a chart can show; None for other texts."""
    column = column_named(key)
    is_known = column is not None and (column.source or key in (*RESULTS, *SETTINGS))
    return column if is_known else None


def read_runs(listing: Listing, columns: Sequence[RunColumn]) -> list[Run]:
    """The newest runs of a search, with the entries of the columns."""
    return list(with_entries(listing.runs, columns).order_by("-created_at", "id")[:MAX_RUNS])


def axis_of(runs: Sequence[Run], columns: Sequence[RunColumn], column: RunColumn) -> ValueAxis:
    """The values of a column; `columns` are those that the runs were read with."""
    values = [_value(run, column, entries_of(vars(run), columns)) for run in runs]
    numbers = [_number(value) for value in values]
    is_numeric = all(
        value is None or number is not None for value, number in zip(values, numbers, strict=True)
    )
    if is_numeric:
        positions = [math.nan if x is None else x for x in numbers]
        return ValueAxis(title=_title(column), positions=np.array(positions, np.float64))
    texts = [None if value is None else text_of(value)[:TEXT_LENGTH] for value in values]
    common = sorted({text for text in texts if text is not None}, key=_natural)[:MAX_TEXTS]
    order = {text: float(position) for position, text in enumerate(common)}
    positions = [math.nan if text is None else order.get(text, math.nan) for text in texts]
    return ValueAxis(title=_title(column), positions=np.array(positions, np.float64), texts=tuple(common))


def differing_settings(listing: Listing, most: int) -> list[str]:
    """The keys of the configuration that differ between runs, those with the fewest values first."""
    keys = [f"config.{name}" for name in listing.vocabulary.config[:SAMPLED_KEYS]]
    columns = [column for key in keys if (column := column_named(key)) is not None]
    if not columns:
        return []
    # As JSON, of which only different texts are decoded.
    entries = {name: Cast(value, TextField()) for name, value in entry_values(columns).items()}
    newest = listing.runs.annotate(**entries).order_by("-created_at", "id").values_list(*entries)
    seen: dict[str, set[str]] = {column.key: set() for column in columns}
    for values in newest[:SAMPLED_RUNS]:
        read = {name: text for name, text in zip(entries, values, strict=True) if text not in (None, "null")}
        for key, text in entries_of(read, columns).items():
            if text is not None:
                seen[key].add(text)
    texts = {key: _scalar_texts(map(json.loads, of_key)) for key, of_key in seen.items()}
    varied = [(len(values), key) for key, values in texts.items() if len(values) > 1]
    return [key for _, key in sorted(varied)[:most]]


def _scalar_texts(values: Iterable[Any]) -> set[str]:
    """The texts of those of the values that an axis can show."""
    return {text_of(value)[:TEXT_LENGTH] for value in values if isinstance(value, str | int | float | bool)}


def _title(column: RunColumn) -> str:
    return f"{column.title} (%)" if column.key == "difference" else column.title


def _value(run: Run, column: RunColumn, entries: Mapping[str, Any]) -> Any:
    if column.source == "scalar" or column.key == "loss":
        return (run.last_scalars or {}).get(column.entry or "loss")
    if column.source:
        return entries.get(column.key)
    if column.key == "difference":
        comparison = getattr(run, "comparison", None)
        own = None if comparison is None else comparison.own_difference
        return None if own is None else 100.0 * own
    if column.key == "duration":
        return ((run.finished_at or run.heartbeat_at) - run.created_at).total_seconds()
    read = {
        "step": run.last_step,
        "seed": run.seed,
        "precision": precision_label(run.precision),
        "recipe": run.recipe_name,
        "group": run.group,
        "state": run.state,
    }
    value = read[column.key]
    return None if value == "" else value


def _number(value: Any) -> float | None:
    """A number, also one that is written as a text, as YAML writes 1e-4; None for other values."""
    if isinstance(value, bool) or value is None:
        return None
    if value in NON_FINITE:
        return math.nan
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _natural(text: str) -> tuple[bool, float, str]:
    """Numbers in their order, then texts."""
    value = _number(text)
    return (value is None, 0.0 if value is None else value, text)
