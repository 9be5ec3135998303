"""Shares of elements that leave the format's range, of many tensors: absolute, and against their own past.

The share of saturated or non-finite elements (overflow) and of elements that become zero (underflow) are
compared with a limit, and with what the tensor had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.arrays import pack, unpack
from fp8scope_dashboard.alerts.detectors.base import Finding, State, percent
from fp8scope_dashboard.alerts.detectors.tensor_alarm import Observed, Wording, tensor_alarm
from fp8scope_dashboard.alerts.detectors.tensor_rows import TensorRows

Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]
Parameters = Mapping[str, float]
Result = tuple[State, list[Finding]]

# In mean absolute deviations: normal noise is hardly clipped.
CLIP = np.float32(3.0)


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

    Args:
        rows: `saturated`, `numel` and, if known, `nonfinite`.
        parameters: `rate`; `points`; `recover`; `warmup`, the steps from the first one that are ignored
            because scales are not settled.
    """
    wording = Wording(
        "overflows", "overflow", lambda rate, name: f"{percent(rate)} of {name}",
        f"above the limit of {percent(parameters['rate'])}", parameters["rate"],
    )  # fmt: skip
    return _above(state, rows, _overflow(rows), parameters, wording)


def underflow(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when more than the share `rate` of a tensor becomes zero in `points` consecutive observations.

    Args:
        rows: `underflow` and `numel`.
        parameters: as of `saturation`.
    """
    wording = Wording(
        "underflows", "underflow", lambda rate, name: f"{percent(rate)} of {name} becomes zero",
        f"above the limit of {percent(parameters['rate'])}", parameters["rate"],
    )  # fmt: skip
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
        "has NaN or infinite elements", "have NaN or infinite elements",
        lambda rate, name: f"{percent(rate)} of {name}", "where none should be", 0.0,
    )  # fmt: skip
    rates = _share(rows.statistics["nonfinite"], rows.statistics["numel"])
    return _above(state, rows, rates, {"rate": 0.0, "warmup": SEARCH, **parameters}, wording)


def _above(state: State, rows: TensorRows, rates: Floats, parameters: Parameters, wording: Wording) -> Result:
    late = rows.after(parameters["warmup"])[:, None]
    with np.errstate(invalid="ignore"):
        over = (rates > parameters["rate"]) & late
    observed = Observed(rows.steps, over, ~np.isnan(rates) & late, rates)
    return tensor_alarm(state, observed, rows.facts.names, parameters, wording)


def saturation_rise(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the overflow rate of a tensor is far above that of its own past; see `_rise`."""
    wording = Wording(
        "overflows more than before", "overflow more than before",
        lambda rate, name: f"{percent(rate)} of {name}",
        f"at least {percent(parameters['rise'])} above its own past", parameters["rise"],
    )  # fmt: skip
    return _rise(state, rows, _overflow(rows), parameters, wording)


def underflow_rise(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the underflow rate of a tensor is far above that of its own past; see `_rise`."""
    wording = Wording(
        "underflows more than before", "underflow more than before",
        lambda rate, name: f"{percent(rate)} of {name} becomes zero",
        f"at least {percent(parameters['rise'])} above its own past", parameters["rise"],
    )  # fmt: skip
    return _rise(state, rows, _underflow(rows), parameters, wording)


def _rise(state: State, rows: TensorRows, rates: Floats, parameters: Parameters, wording: Wording) -> Result:
    """Open when a rate exceeds m + max(z d, `rise`, m) in `points` consecutive observations.

    m and d are exponential averages of the rate and of its deviation below m, with the weight 1 / `window`:
    noise falls as far as it rises, and a rise must not count as its own noise. A rate enters them no further
    from m than the limit times CLIP / z (Huber's clipping), so that a fault hardly raises its own limit, and
    a lasting new level is the tensor's past after some hundred observations.

    Args:
        parameters: `z`; `rise`, in elements over all elements; `window`, also the observations of a tensor
            before it is judged; `points`, `recover`.
    """
    past = _Past.restored(state, len(rows.facts.names))
    seen = ~np.isnan(rates)
    over = past.exceeded(rates, seen, parameters)
    observed = Observed(rows.steps, over, seen, rates)
    after, findings = tensor_alarm(state, observed, rows.facts.names, parameters, wording)
    return after | past.as_state(), findings


@dataclass
class _Past:
    """float32[n] each: the average of a rate, of its absolute deviation, and the number of observations."""

    mean: Float32s
    deviation: Float32s
    count: Float32s

    @classmethod
    def restored(cls, state: State, n: int) -> _Past:
        names = ("mean", "deviation", "count")
        return cls(*(unpack(state.get(name), n, np.float32(0.0)) for name in names))

    def as_state(self) -> State:
        return {name: pack(getattr(self, name)) for name in ("mean", "deviation", "count")}

    def exceeded(self, rates: Floats, seen: NDArray[np.bool_], parameters: Parameters) -> NDArray[np.bool_]:
        """bool[R, n]. Row by row, because each observation changes the limit of the next."""
        over = np.zeros(rates.shape, bool)
        z, rise, window = (np.float32(parameters[name]) for name in ("z", "rise", "window"))
        reach = np.minimum(np.float32(1.0), CLIP / z)
        values = np.where(seen, rates, 0.0).astype(np.float32)
        complete: NDArray[np.bool_] = np.asarray(seen.all(axis=1))
        for i in range(len(rates)):
            x = values[i]
            distance = np.maximum(np.maximum(z * self.deviation, self.mean), rise)
            known = self.count >= window
            row = (x > self.mean + distance) & known
            # The first observations count equally.
            weight = np.float32(1.0) / np.minimum(self.count + np.float32(1.0), window)
            if not complete[i]:
                row &= seen[i]
                weight = np.where(seen[i], weight, np.float32(0.0))
            over[i] = row
            step = x - self.mean
            step = np.where(known, np.minimum(step, reach * distance), step)
            self.mean += weight * step
            falls = (step <= 0.0) | ~known
            self.deviation += weight * falls * (np.abs(step) - self.deviation)
            self.count += seen[i]
        return over
