"""The detector of the rules that people write: a condition on one statistic of any number of series.

Vectorised over the series; the state of a series has a fixed size, whatever the length of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State, finite, in_words
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import count, usable

Condition = Literal["above", "below", "rises_by", "falls_by", "changes_by_factor", "not_finite"]

# Series that the evidence names; the message names the first.
NAMED: Final = 10
RELATIVE: Final = ("rises_by", "falls_by", "changes_by_factor")
WORDS: Final[Mapping[str, str]] = {
    "above": "above",
    "below": "below",
    "rises_by": "more above its average than",
    "falls_by": "more below its average than",
    "changes_by_factor": "changed against its average by more than a factor of",
}


@dataclass(kw_only=True)
class _Series:
    """The state of all series, one element (or row of `recent`) each."""

    average: Floats
    seen: NDArray[np.int64]
    # The condition at the last `points` observations, as a ring with one position for each series.
    recent: NDArray[np.bool_]
    # How many of these are true.
    held: NDArray[np.int64]
    position: NDArray[np.int64]
    onset: NDArray[np.int64]
    calm: NDArray[np.int64]
    active: NDArray[np.bool_]


def threshold(
    state: State,
    steps: NDArray[np.int64],
    values: Floats,
    names: Sequence[str],
    condition: Condition,
    parameters: Mapping[str, float],
    *,
    statistic: str = "",
) -> tuple[State, list[ConditionChange]]:
    """Open when the condition holds in `share` of the last `points` observations of any series.

    Conditions, for an observation x and the average A of the earlier ones:

        above               x > value
        below               x < value
        rises_by            x - A > value
        falls_by            A - x > value
        changes_by_factor   max(x / A, A / x) > value; also if x and A differ in sign, or one of them is 0
        not_finite          x is NaN or infinite

    A is the mean of all earlier observations until there are `window` of them; then it is the exponentially
    weighted one, A += 2 / (window + 1) * (x - A). Without an earlier observation no relative condition holds.
    Observations that are not finite, or above 1e100, do not enter A. NaN is neither above nor below a value.

    Args:
        steps: int64[R]; rows whose step is not above the last one are ignored.
        values: float64[R, n].
        names: n names; later calls may add columns but not move them.
        parameters: `value`; `points`, `share` and `window`, see above; `recover`: observations in a row
            without the condition that end it for a series.
        statistic: the statistic of tensors that the series are; empty: they are scalars. NaN means for
            tensors that the series was not observed in this row, and is a value of a scalar.

    There is one finding for all series; it closes when the condition has ended for every one. The result does
    not depend on how the rows are cut into calls.
    """
    points, width = int(parameters["points"]), len(names)
    series, need = _loaded(state, width, points), _needed(points, parameters["share"])
    last, opened_at = state.get("last_step"), state.get("onset_step")
    columns, findings = np.arange(width), []
    for step, row in zip(steps.tolist(), values, strict=True):
        if last is not None and step <= last:
            continue
        last = step
        observed = ~np.isnan(row) if statistic else np.ones(width, np.bool_)
        if not observed.any():
            continue
        holds = observed & _holds(condition, row, series, parameters["value"])
        _count(series, columns, observed, holds, step, points, need, int(parameters["recover"]))
        if opened_at is None and series.active.any():
            findings.append(_finding(step, row, series, names, condition, parameters, statistic))
            opened_at = findings[-1].onset_step
        elif opened_at is not None and not series.active.any():
            findings.append(ConditionChange(opened=False, onset_step=opened_at, step=step))
            opened_at = None
        if condition in RELATIVE:
            _average(series, observed & usable(row), row, parameters["window"])
    after = {"last_step": last, "onset_step": opened_at, "open": opened_at is not None, "points": points}
    return {**after, **_stored(series)}, findings


def _needed(points: int, share: float) -> int:
    """The observations of `points` in which the condition must hold."""
    # Less the rounding error of the product.
    return max(1, int(np.ceil(points * share - 1e-9)))


def _holds(condition: Condition, x: Floats, series: _Series, value: float) -> NDArray[np.bool_]:
    if condition == "not_finite":
        return ~np.isfinite(x)
    # Comparisons with NaN are false.
    average = np.where(series.seen > 0, series.average, np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        if condition == "above":
            return x > value
        if condition == "below":
            return x < value
        if condition == "rises_by":
            return x - average > value
        if condition == "falls_by":
            return average - x > value
        low, high = np.minimum(np.abs(x), np.abs(average)), np.maximum(np.abs(x), np.abs(average))
        return (high > value * low) | (np.sign(x) * np.sign(average) < 0)


def _count(
    series: _Series,
    columns: NDArray[np.int64],
    observed: NDArray[np.bool_],
    holds: NDArray[np.bool_],
    step: int,
    points: int,
    need: int,
    recover: int,
) -> None:
    at = (series.position, columns)
    leaving = series.recent[at] & observed
    series.onset[holds & (series.held == 0) & ~series.active] = step
    series.recent[at] = np.where(observed, holds, series.recent[at])
    series.held += holds.astype(np.int64) - leaving
    series.position = np.where(observed, (series.position + 1) % points, series.position)
    series.calm = np.where(observed, np.where(holds, 0, series.calm + 1), series.calm)
    series.active |= observed & (series.held >= need)
    ended = series.active & (series.calm >= recover)
    if ended.any():
        series.active &= ~ended
        # The observations of a condition that has ended do not open it again.
        series.recent[:, ended] = False
        series.held[ended] = 0


def _average(series: _Series, counted: NDArray[np.bool_], row: Floats, window: float) -> None:
    series.seen = np.where(counted, series.seen + 1, series.seen)
    weight = np.maximum(1.0 / np.maximum(series.seen, 1), 2.0 / (window + 1.0))
    with np.errstate(invalid="ignore", over="ignore"):
        series.average = np.where(counted, series.average + weight * (row - series.average), series.average)


def _finding(
    step: int,
    row: Floats,
    series: _Series,
    names: Sequence[str],
    condition: Condition,
    parameters: Mapping[str, float],
    statistic: str,
) -> ConditionChange:
    # The series that began first lead; of those, the first of the catalogue.
    active = np.flatnonzero(series.active)
    order = active[np.argsort(series.onset[active], kind="stable")]
    first = int(order[0])
    value, onset = float(row[first]), int(series.onset[first])
    tensors = [
        {"name": names[i], "value": finite(float(row[i])), "onset_step": int(series.onset[i])}
        for i in order[:NAMED].tolist()
    ]
    name = f"{statistic} of {names[first]}" if statistic else names[first]
    limit = None if condition in ("not_finite", *RELATIVE) else parameters["value"]
    sentence = f"{name} is {_said(value, condition, parameters['value'])} since step {onset:,}"
    if condition in RELATIVE:
        sentence += f" (average: {in_words(float(series.average[first]))})"
    others = f"; {count(len(order) - 1, 'more tensor')}" if len(order) > 1 else ""
    evidence = {"tensors": tensors, "tensors_over": len(order)} if statistic else {}
    return ConditionChange(
        opened=True,
        onset_step=onset,
        step=step,
        value=finite(value),
        threshold=limit,
        message=f"{sentence}{others}.",
        evidence=evidence,
    )


def _said(value: float, condition: Condition, limit: float) -> str:
    if condition == "not_finite":
        return in_words(value)
    return f"{in_words(value)}, {WORDS[condition]} {in_words(limit)},"


def _loaded(state: State, width: int, points: int) -> _Series:
    """The state of `width` series. A changed number of points starts the counts again, not the average."""
    seen = len(state.get("seen", ()))
    series = _Series(
        average=np.zeros(width),
        seen=np.zeros(width, np.int64),
        recent=np.zeros((points, width), np.bool_),
        held=np.zeros(width, np.int64),
        position=np.zeros(width, np.int64),
        onset=np.zeros(width, np.int64),
        calm=np.zeros(width, np.int64),
        active=np.zeros(width, np.bool_),
    )
    for name in ("average", "seen", "onset", "calm", "active"):
        getattr(series, name)[:seen] = state.get(name, ())
    if state.get("points") == points:
        series.position[:seen] = state["position"]
        for column, text in state["recent"].items():
            series.recent[:, int(column)] = [mark == "1" for mark in text]
        series.held = series.recent.sum(axis=0)
    return series


def _stored(series: _Series) -> dict[str, Any]:
    """JSON types; of the rings only those of series in which the condition has held lately."""
    rings = np.flatnonzero(series.held).tolist()
    return {
        "average": series.average.tolist(),
        "seen": series.seen.tolist(),
        "position": series.position.tolist(),
        "onset": series.onset.tolist(),
        "calm": series.calm.tolist(),
        "active": series.active.tolist(),
        "recent": {str(i): "".join("1" if mark else "0" for mark in series.recent[:, i]) for i in rings},
    }
