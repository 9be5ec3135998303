"""Shares of elements that leave the format's range, of many tensors: absolute, and against their own past.

The share of saturated or non-finite elements (overflow) and of elements that become zero (underflow) are
compared with a limit, and with what the tensor had before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.arrays import pack, unpack
from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State, percent
from fp8scope_dashboard.alerts.detectors.tensor_alarm import CANCEL, ConditionRows, Wording, tensor_alarm
from fp8scope_dashboard.alerts.detectors.tensor_rows import TensorRows
from fp8scope_dashboard.statistics.arrays import Floats

Float32s = NDArray[np.float32]
Parameters = Mapping[str, float]
Result = tuple[State, list[ConditionChange]]

# In mean absolute deviations: normal noise is hardly clipped.
CLIP = np.float32(3.0)
# Observations over which a rate is averaged before it is judged.
SPAN = 30.0
# Windows over which the lowest level is forgotten.
FORGET = np.float32(8.0)
# The share by which a deviation that was learned over a single window may be larger.
UNSURE = np.float32(3.0)
# Elements of a small tensor that are counted by chance.
FEW = 3.0


def overflow_rates(saturated: Floats, nonfinite: Floats | None, numel: Floats) -> Floats:
    """(saturated + nonfinite) / numel, float64[R, n]; NaN where a tensor is empty or was not observed."""
    count = saturated if nonfinite is None else saturated + np.where(np.isnan(nonfinite), 0.0, nonfinite)
    return _share(count, numel)


def _share(counts: Floats, numel: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(numel > 0, counts / numel, np.nan)


def _overflow(rows: TensorRows) -> Floats:
    statistics = rows.statistics
    return overflow_rates(statistics["saturated"], statistics.get("nonfinite"), statistics["numel"])


def _underflow(rows: TensorRows) -> Floats:
    return _share(rows.statistics["underflow"], rows.statistics["numel"])


def saturation(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the overflow rate of a tensor is above `rate` in `points` consecutive observations.

    Or if it is above `rate` on average, where an observation counts as at most CANCEL + 1 times `rate`: see
    the score of `tensor_alarm`. Up to FEW elements of a small tensor are no overflow.

    Args:
        rows: `saturated`, `numel` and, if known, `nonfinite`.
        parameters: `rate`; `points`; `recover`; `warmup`, the steps from the first one that are ignored
            because scales are not settled.
    """
    wording = Wording(
        singular="overflows", plural="overflow", amount=lambda rate, name: f"{percent(rate)} of {name}",
        limit=f"above the limit of {percent(parameters['rate'])}", threshold=parameters["rate"],
    )  # fmt: skip
    rates = _overflow(rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        few = rates * rows.statistics["numel"] <= FEW
        times = rates / parameters["rate"] if parameters["rate"] else np.where(rates > 0, np.inf, 0.0)
    gains = np.clip(np.nan_to_num(times) - 1.0, 0.0, CANCEL).astype(np.int64)
    return _above(state, rows, np.where(few, 0.0, rates), parameters, wording, gains)


def underflow(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when more than the share `rate` of a tensor becomes zero in `points` consecutive observations.

    Args:
        rows: `underflow` and `numel`.
        parameters: as of `saturation`.
    """
    wording = Wording(
        singular="underflows",
        plural="underflow",
        amount=lambda rate, name: f"{percent(rate)} of {name} becomes zero",
        limit=f"above the limit of {percent(parameters['rate'])}",
        threshold=parameters["rate"],
    )
    return _above(state, rows, _underflow(rows), parameters, wording)


# Steps in which a loss scale is found from 2^16 downwards, one power of two a step.
SEARCH = 12


def tensor_not_finite(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when a tensor has NaN or infinite elements in `points` consecutive observations.

    A loss scale that is searched for makes single steps infinite, and several of the first SEARCH steps;
    GradScaler skips them.

    Args:
        rows: `nonfinite` and `numel`.
        parameters: `points`, `recover`.
    """
    wording = Wording(
        singular="has NaN or infinite elements", plural="have NaN or infinite elements",
        amount=lambda rate, name: f"{percent(rate)} of {name}", limit="where none should be", threshold=0.0,
    )  # fmt: skip
    rates = _share(rows.statistics["nonfinite"], rows.statistics["numel"])
    return _above(state, rows, rates, {"rate": 0.0, "warmup": SEARCH, **parameters}, wording)


def _above(
    state: State,
    rows: TensorRows,
    rates: Floats,
    parameters: Parameters,
    wording: Wording,
    gains: NDArray[np.int64] | None = None,
) -> Result:
    late = rows.after(parameters["warmup"])[:, None]
    with np.errstate(invalid="ignore"):
        over = (rates > parameters["rate"]) & late
    seen = ~np.isnan(rates)
    observed = ConditionRows(
        steps=rows.steps, over=over, seen=seen & late, values=rates, gains=gains, observed=seen
    )
    return tensor_alarm(state, observed, rows.facts.names, parameters, wording, intermittent=True)


def saturation_rise(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the overflow rate of a tensor is far above that of its own past; see `_rise`."""
    wording = Wording(
        singular="overflows more than before", plural="overflow more than before",
        amount=lambda rate, name: f"{percent(rate)} of {name}",
        limit=f"at least {percent(parameters['rise'])} above its own past", threshold=parameters["rise"],
    )  # fmt: skip
    return _rise(state, rows, _overflow(rows), parameters, wording)


def underflow_rise(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the underflow rate of a tensor is far above that of its own past; see `_rise`."""
    wording = Wording(
        singular="underflows more than before", plural="underflow more than before",
        amount=lambda rate, name: f"{percent(rate)} of {name} becomes zero",
        limit=f"at least {percent(parameters['rise'])} above its own past", threshold=parameters["rise"],
    )  # fmt: skip
    return _rise(state, rows, _underflow(rows), parameters, wording)


def _rise(state: State, rows: TensorRows, rates: Floats, parameters: Parameters, wording: Wording) -> Result:
    """Open when y = ln(x + r) of a rate x exceeds l + max(z d, ln 2) in `points` observations.

    So with little noise x must be above 2 l + r, with l as a rate. r is `rise`, or FEW elements of the tensor
    if that is more. m is the exponential average of y over `window` observations, and l the lowest m, which
    follows m over FORGET windows: a slow rise does not count as its own past. d is the average fall of f
    below m, where f averages y over SPAN observations: noise falls as far as it rises, and a rise must not
    count as its own noise. Either y or f must be above the limit. A y enters m no further above it than the
    limit times CLIP / z (Huber's clipping), so that a fault hardly raises its own limit, and a lasting new
    level becomes the tensor's past.

    Args:
        parameters: `z`; `rise`, in elements over all elements; `window`, also the observations of a tensor
            before it is judged; `points`, `recover`.
    """
    past = _Past.restored(state, len(rows.facts.names))
    seen = ~np.isnan(rates)
    with np.errstate(invalid="ignore", divide="ignore"):
        least = np.maximum(parameters["rise"], FEW / rows.statistics["numel"])
        # Counts may come from any client: a rate beyond 0 to 1 must not become the past.
        logs = np.log(np.where(seen, np.clip(rates, 0.0, 1.0) + least, 1.0).astype(np.float32))
    over = past.exceeded(logs, seen, parameters)
    observed = ConditionRows(steps=rows.steps, over=over, seen=seen, values=rates)
    after, findings = tensor_alarm(state, observed, rows.facts.names, parameters, wording)
    return after | past.as_state(), findings


@dataclass
class _Past:
    """float32[n] each, of y: its averages m and f, the lowest m, the average fall, the observations."""

    mean: Float32s
    fast: Float32s
    lowest: Float32s
    deviation: Float32s
    count: Float32s

    NAMES: ClassVar = ("log_mean", "fast", "lowest", "deviation", "count")

    @classmethod
    def restored(cls, state: State, n: int) -> _Past:
        # A state of an earlier version has averages of the rate itself: such a tensor is learned again.
        saved = state if cls.NAMES[0] in state else {}
        return cls(*(unpack(saved.get(name), n, np.float32(0.0)) for name in cls.NAMES))

    def as_state(self) -> State:
        columns = (self.mean, self.fast, self.lowest, self.deviation, self.count)
        return {name: pack(column) for name, column in zip(self.NAMES, columns, strict=True)}

    def exceeded(
        self, values: Float32s, seen: NDArray[np.bool_], parameters: Parameters
    ) -> NDArray[np.bool_]:
        """bool[R, n]. Row by row, because each observation changes the limit of the next."""
        over = np.zeros(values.shape, bool)
        z, window = np.float32(parameters["z"]), np.float32(parameters["window"])
        unit, least = np.float32(1.0), np.float32(math.log(2.0))
        reach, quick = np.minimum(unit, CLIP / z), np.float32(2.0 / (SPAN + 1.0))
        complete: NDArray[np.bool_] = np.asarray(seen.all(axis=1))
        for i in range(len(values)):
            # A deviation that was learned from few windows may be far too small.
            doubt = unit + UNSURE * window / np.maximum(self.count, unit)
            limit = np.maximum(z * doubt * self.deviation, least)
            is_learned = self.count >= window
            highest = self.lowest + limit
            # The first observations count equally.
            weight = unit / np.minimum(self.count + unit, window)
            faster = np.maximum(weight, quick)
            if not complete[i]:
                weight, faster = np.where(seen[i], weight, 0.0), np.where(seen[i], faster, 0.0)
            # One observation, however high, does not make the average high.
            y = np.where(is_learned, np.minimum(values[i], highest + limit), values[i])
            self.fast += faster * (y - self.fast)
            over[i] = (np.maximum(y, self.fast) > highest) & is_learned & seen[i]
            step = np.where(is_learned, np.minimum(y - self.mean, reach * limit), y - self.mean)
            fall = self.mean - self.fast
            self.deviation += weight * ((fall >= 0.0) | ~is_learned) * (np.abs(fall) - self.deviation)
            self.mean += weight * step
            risen = self.lowest + weight / FORGET * (self.mean - self.lowest)
            self.lowest = np.where(is_learned, np.minimum(risen, self.mean), self.mean)
            self.count += seen[i]
        return over
