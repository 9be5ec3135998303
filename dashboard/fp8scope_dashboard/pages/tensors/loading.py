"""Load the values of tensors for the map and the ranking.

Both show the same columns of the whole run, and every click asks again. The last few of them are kept in the
process for as long as the run has no new rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.onset_search import COLUMNS
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.aggregates import FINEST
from fp8scope_dashboard.telemetry.queries import Heatmap

# Below this many cells (steps x tensors) a zoomed map reads rows; above it, the finest roll-ups.
RAW_CELLS: Final = 3_000_000
MIN_COLUMNS: Final = 60

MAX_KEPT: Final = 4
KEPT_BYTES: Final = 16 << 20

_Key = tuple[object, ...]
_kept: OrderedDict[_Key, Heatmap] = OrderedDict()
_lock = Lock()
# A page asks for its map and its ranking at once: the second waits for what the first reads.
_reading: dict[_Key, Lock] = {}


def overview(run: Run, statistic: str) -> Heatmap:
    """All tensors of a run over all its steps, in at most COLUMNS columns."""
    return _remembered(run, (statistic,), lambda: queries.heatmap(run.pk, statistic, columns=COLUMNS))


def detail(run: Run, statistic: str, tensors: list[int], first: int | None, last: int | None) -> Heatmap:
    """Some tensors of a run in a range of steps, in as many columns as can be read quickly."""

    def load() -> Heatmap:
        columns = columns_of(run.pk, len(tensors), first, last)
        return queries.heatmap(
            run.pk, statistic, tensors=tensors, first=first, last=last, columns=columns, widen=True
        )

    return _remembered(run, (statistic, first, last, tuple(tensors)), load)


def _remembered(run: Run, of: _Key, load: Callable[[], Heatmap]) -> Heatmap:
    """Return what `load` returned before, if the run has no new rows since."""
    key = (run.pk, run.rows_stored, run.last_step, run.state, *of)
    with _lock:
        turn = _reading.setdefault(key, Lock())
    try:
        with turn:
            with _lock:
                if key in _kept:
                    _kept.move_to_end(key)
                    return _kept[key]
            heatmap = load()
            with _lock:
                if heatmap.values.nbytes <= KEPT_BYTES:
                    _kept[key] = heatmap
                while len(_kept) > MAX_KEPT:
                    _kept.popitem(last=False)
            return heatmap
    finally:
        with _lock:
            _reading.pop(key, None)


def columns_of(run_id: UUID, tensors: int, first: int | None, last: int | None, most: int = COLUMNS) -> int:
    """The columns of a range of steps of a run, at most `most`, that can be read quickly."""
    stored = queries.step_range(run_id)
    if stored is None:
        return most
    low = stored[0] if first is None else max(first, stored[0])
    high = stored[1] if last is None else min(last, stored[1])
    return affordable_columns(high - low + 1, tensors, most)


def affordable_columns(steps: int, tensors: int, most: int = COLUMNS) -> int:
    """The columns of a range of steps: fewer than `most` where those would have to be read from rows."""
    if steps * tensors <= RAW_CELLS or steps >= FINEST * most:
        return most
    return min(most, max(MIN_COLUMNS, steps // FINEST))


def of_tensors(heatmap: Heatmap, indices: list[int]) -> NDArray[np.float64]:
    """The rows of some tensors, by Tensor.index, in this order: float64[len(indices), C]; NaN if absent."""
    rows = {index: row for row, index in enumerate(heatmap.indices)}
    values = np.full((len(indices), heatmap.values.shape[1]), np.nan)
    present = [(i, rows[index]) for i, index in enumerate(indices) if index in rows]
    if present:
        targets, origins = zip(*present, strict=True)
        values[list(targets)] = heatmap.values[list(origins)]
    return values
