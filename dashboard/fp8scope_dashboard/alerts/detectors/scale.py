"""Scales that do not follow their amax: frozen, made for another amax, or jumped.

A scale s is made for the amax M 2^-margin / s, with M the largest value of the format. The use of the range,
u = log2(amax s / M) + margin, is 0 if the scale fits exactly, negative if a part of the range is unused, and
positive if values saturate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.arrays import pack, unpack
from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State
from fp8scope_dashboard.alerts.detectors.tensor_alarm import ConditionRows, Wording, tensor_alarm
from fp8scope_dashboard.alerts.detectors.tensor_rows import TensorRows
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import as_factor

Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]
Parameters = Mapping[str, float]
Result = tuple[State, list[ConditionChange]]

# In powers of two: 3 %, far above the rounding of float32.
ABOVE = 0.05
# Consecutive observations above what an unchanged scale was made for, after which it must have followed.
FOLLOWS_WITHIN = 16
# Intervals between observations after which a tensor has been absent.
ABSENT = np.float32(4.0)
# Powers of two that the amax of a tensor with a scale per block or row must move further: the known scale is
# that of the median block, rounded, while the amax is that of the largest and varies more.
BLOCK_OCTAVES = 4.0


@dataclass(frozen=True)
class _Scales:
    """log2 of the amax and of the scale, float32[R, n], and where both are known and positive."""

    amax: Float32s
    scale: Float32s
    seen: Bools

    @classmethod
    def of(cls, rows: TensorRows) -> _Scales:
        amax, scale = rows.statistics["amax"], rows.statistics["scale"]
        with np.errstate(invalid="ignore", divide="ignore"):
            seen = (amax > 0) & np.isfinite(amax) & (scale > 0) & np.isfinite(scale)
            return cls(
                np.where(seen, np.log2(np.where(seen, amax, 1.0)), 0.0).astype(np.float32),
                np.where(seen, np.log2(np.where(seen, scale, 1.0)), 0.0).astype(np.float32),
                seen,
            )

    def use(self, rows: TensorRows) -> Floats:
        """u, float64[R, n]; NaN where it is unknown."""
        facts = rows.facts
        with np.errstate(invalid="ignore"):
            judged = self.seen & facts.per_tensor & np.isfinite(facts.largest)
            return np.where(judged, self.amax + self.scale - np.log2(facts.largest) + facts.margin, np.nan)


def scale_frozen(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when a scale stays exactly the same while the amax that it should follow moves.

    Either the amax is above what the scale was made for in more than FOLLOWS_WITHIN consecutive observations,
    or the scale is constant for longer than its `patience`, and the smallest and the largest amax meanwhile
    are `octaves` powers of two apart (of scales per block or row, BLOCK_OCTAVES more). The onset is the first
    observation with this scale, as in the diagnosis.

    Args:
        rows: `amax` and `scale`.
        parameters: `octaves`, `points`, `recover`.
    """
    scales = _Scales.of(rows)
    n = len(rows.facts.names)
    use = scales.use(rows)
    names = ("scale", "low", "high", "same", "above")
    last, low, high, same, above = (unpack(state.get(name), n, np.float32(0.0)) for name in names)
    since = _Since.restored(state, scales.seen.shape)
    over = np.zeros(scales.seen.shape, bool)
    moved = np.zeros(scales.seen.shape, np.float32)
    octaves = parameters["octaves"] + np.where(rows.facts.per_tensor, 0.0, BLOCK_OCTAVES)
    with np.errstate(invalid="ignore"):
        too_high = use > ABOVE
    for i in range(len(rows.steps)):
        seen, amax, scale = scales.seen[i], scales.amax[i], scales.scale[i]
        unchanged = (scale == last) & (same > 0)
        begins, goes_on = seen & ~unchanged, seen & unchanged
        since.count(i, int(rows.steps[i]), begins, seen)
        low = np.where(begins, amax, np.where(goes_on, np.minimum(low, amax), low))
        high = np.where(begins, amax, np.where(goes_on, np.maximum(high, amax), high))
        last = np.where(seen, scale, last)
        same = np.where(begins, np.float32(1.0), same + goes_on)
        above = np.where(seen, np.where(too_high[i] & unchanged, above + 1, np.float32(0.0)), above)
        # The amax may have left before it was seen at this scale.
        moved[i] = np.fmax(high - low, np.where(above > FOLLOWS_WITHIN, use[i], np.float32(0.0)))
        stays = (same > rows.facts.patience) & (high - low > octaves)
        over[i] = seen & ((above > FOLLOWS_WITHIN) | stays)
    wording = Wording(
        singular="keeps its scale while its amax moves", plural="keep their scale while their amax moves",
        amount=lambda octaves, name: f"the amax of {name} has moved by a factor of {as_factor(octaves)}",
        limit="and the scale is unchanged", unit="octaves",
    )  # fmt: skip
    observed = since.observed(rows, over, scales.seen, moved.astype(np.float64))
    after, findings = tensor_alarm(state, observed, rows.facts.names, parameters, wording)
    arrays = zip(names, (last, low, high, same, above), strict=True)
    kept_arrays = {name: pack(array.astype(np.float32)) for name, array in arrays}
    return after | kept_arrays | since.as_state(), findings


def scale_stale(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when a scale was made for an amax that is `octaves` powers of two from the tensor's, for long.

    For longer than the `patience` of the tensor: a delayed scale may lag behind by its history. The onset is
    the first observation that is so far.

    Args:
        rows: `amax` and `scale`.
        parameters: `octaves`; `points`, beyond the patience; `recover`.
    """
    use = _Scales.of(rows).use(rows)
    n = len(rows.facts.names)
    seen = ~np.isnan(use)
    with np.errstate(invalid="ignore"):
        far = np.abs(use) > parameters["octaves"]
    count = unpack(state.get("far"), n, np.float32(0.0))
    since = _Since.restored(state, seen.shape)
    over = np.zeros(seen.shape, bool)
    if far.any() or count.any():
        for i in range(len(rows.steps)):
            since.count(i, int(rows.steps[i]), far[i] & (count == 0), seen[i])
            count = np.where(seen[i], np.where(far[i], count + 1, np.float32(0.0)), count)
            over[i] = far[i] & (count > rows.facts.patience)
    else:
        since.skip(rows.steps, seen)
    wording = Wording(
        singular="has a scale for another amax", plural="have scales for another amax",
        amount=lambda octaves, name: f"that of {name} is off by a factor of {as_factor(octaves)}",
        limit=f"above the limit of {as_factor(parameters['octaves'])}", unit="octaves",
    )  # fmt: skip
    observed = since.observed(rows, over, seen, np.abs(use))
    after, findings = tensor_alarm(state, observed, rows.facts.names, parameters, wording)
    return after | {"far": pack(count.astype(np.float32))} | since.as_state(), findings


def scale_jump(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when a scale changes by more than `octaves` powers of two between two observations.

    Observations without an amax do not count: the scale of an empty or all-zero tensor means nothing. A
    tensor is not judged in its first `warmup` steps, in which its scale is found: those of the training, or
    of a layer or expert that is used later. After an absence, such as a fallback to BF16, which restarts
    a scale, it is not judged for FOLLOWS_WITHIN observations.

    Args:
        rows: `amax` and `scale`.
        parameters: `octaves`; `warmup`; `points`, `recover`.
    """
    scales = _Scales.of(rows)
    n = len(rows.facts.names)
    last = unpack(state.get("scale"), n, np.float32(np.nan))
    presence = _Presence.restored(state, n)
    jumps = np.zeros(scales.seen.shape, np.float32)
    settled = np.zeros(scales.seen.shape, bool)
    for i, step in enumerate(rows.steps.tolist()):
        seen = scales.seen[i]
        settled[i] = presence.settled(step, seen, parameters["warmup"])
        jumps[i] = np.where(seen, np.abs(scales.scale[i] - last), np.float32(0.0))
        last = np.where(seen, scales.scale[i], last)
    with np.errstate(invalid="ignore"):
        over = (jumps > parameters["octaves"]) & settled
    wording = Wording(
        singular="has a scale that jumped", plural="have scales that jumped",
        amount=lambda octaves, name: f"that of {name} by a factor of {as_factor(octaves)}",
        limit=f"above the limit of {as_factor(parameters['octaves'])}", unit="octaves",
    )  # fmt: skip
    observed = ConditionRows(
        steps=rows.steps, over=over, seen=settled, values=jumps.astype(np.float64), observed=scales.seen
    )
    after, findings = tensor_alarm(state, observed, rows.facts.names, parameters, wording)
    return after | {"scale": pack(last.astype(np.float32))} | presence.as_state(), findings


@dataclass
class _Since:
    """Since when the present state of each tensor lasts.

    Attributes:
        step, before: int64[n], its first observation and the last one before that; negative: none.
        latest: int64[n], the last observation.
        steps, befores: int64[R, n], `step` and `before` after each row.
    """

    step: Int64s
    before: Int64s
    latest: Int64s
    steps: Int64s
    befores: Int64s

    @classmethod
    def restored(cls, state: State, shape: tuple[int, ...]) -> _Since:
        none = np.int64(-1)
        names = ("since", "since_after", "seen_at")
        step, before, latest = (unpack(state.get(name), shape[1], none) for name in names)
        return cls(step, before, latest, np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def as_state(self) -> State:
        return {"since": pack(self.step), "since_after": pack(self.before), "seen_at": pack(self.latest)}

    def count(self, i: int, step: int, begins: Bools, seen: Bools) -> None:
        """Count row i, in which the states of some tensors begin."""
        self.step = np.where(begins, step, self.step)
        self.before = np.where(begins, self.latest, self.before)
        self.latest = np.where(seen, step, self.latest)
        # States of earlier versions do not say when they began.
        self.steps[i] = np.where(self.step < 0, step, self.step)
        self.befores[i] = self.before

    def skip(self, steps: Int64s, seen: Bools) -> None:
        """Count rows in which no state begins."""
        last = len(steps) - 1 - np.argmax(seen[::-1], axis=0)
        self.latest = np.where(seen.any(axis=0), steps[last], self.latest)

    def observed(self, rows: TensorRows, over: Bools, seen: Bools, values: Floats) -> ConditionRows:
        """The rows of a condition that begins where the state of its tensor does."""
        return ConditionRows(
            steps=rows.steps, over=over, seen=seen, values=values, began=self.steps, before=self.befores
        )


@dataclass
class _Presence:
    """Since when tensors are observed, and how often.

    Attributes:
        first, latest: int64[n], steps of observations; -1: none.
        interval: float32[n], the average number of steps between two observations.
        count: float32[n], observations since the last absence; more than FOLLOWS_WITHIN if there was none.
    """

    first: NDArray[np.int64]
    latest: NDArray[np.int64]
    interval: Float32s
    count: Float32s

    @classmethod
    def restored(cls, state: State, n: int) -> _Presence:
        return cls(
            unpack(state.get("first"), n, np.int64(-1)),
            unpack(state.get("latest"), n, np.int64(-1)),
            unpack(state.get("interval"), n, np.float32(0.0)),
            unpack(state.get("count"), n, np.float32(FOLLOWS_WITHIN + 1)),
        )

    def as_state(self) -> State:
        steps = {"first": pack(self.first), "latest": pack(self.latest)}
        return steps | {"interval": pack(self.interval), "count": pack(self.count.astype(np.float32))}

    def settled(self, step: int, seen: Bools, warmup: float) -> Bools:
        """Count a row; return which of its observed tensors have been there for long enough."""
        new = seen & (self.first < 0)
        again = seen & ~new
        waited = (step - self.latest).astype(np.float32)
        has_interval = self.interval > 0
        absent = again & has_interval & (waited > ABSENT * self.interval)
        # Runs may begin to log less often: a longer interval is learned within some observations.
        counted = np.minimum(waited, np.where(has_interval, ABSENT * self.interval, waited))
        weight = np.where(has_interval, np.float32(0.05), np.float32(1.0))
        self.interval = np.where(again, self.interval + weight * (counted - self.interval), self.interval)
        self.count = np.where(absent, np.float32(0.0), np.minimum(self.count + seen, FOLLOWS_WITHIN + 1))
        self.first[new] = step
        self.latest[seen] = step
        return seen & (step - self.first >= warmup) & (self.count > FOLLOWS_WITHIN)
