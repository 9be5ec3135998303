"""Statistics that rise far above their own past before the loss does; benchmarks/early_signs.py measures it.

One detector for all of them. It compares logarithms, because healthy values of these statistics differ by
orders of magnitude between tensors, and a cause that grows is a straight line in them.
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
from fp8scope_dashboard.text.numbers import rounded

Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
Parameters = Mapping[str, float]
Result = tuple[State, list[ConditionChange]]

# In mean absolute deviations: normal noise is hardly clipped.
CLIP = np.float32(3.0)
# Added to the evenness of a load, 1 minus its imbalance, so that one expert that gets all is no infinity.
MIN_EVEN = 0.05


def kurtosis_growth(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the kurtosis of a layer's input is far above its own past: an outlier feature grows."""
    wording = _wording("has growing outliers", "have growing outliers", "the kurtosis", parameters)
    return sign(state, rows, rows.statistics["kurtosis"], parameters, wording)


def logit_growth(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the bound of the attention logits of a layer is far above its own past."""
    words = "has growing attention logits", "have growing attention logits"
    wording = _wording(*words, "the bound of the attention logits", parameters)
    return sign(state, rows, rows.statistics["logit_bound"], parameters, wording)


def router_collapse(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the load of a router's experts becomes far less even than in its own past.

    The imbalance of small batches is noise around a small number, so that its logarithm says little. The
    evenness, 1 minus the imbalance, is near 1 until the router collapses.
    """
    words = "shares its tokens out less evenly", "share their tokens out less evenly"
    wording = _wording(*words, "the unevenness of the load", parameters)
    uneven = 1.0 / (1.0 + MIN_EVEN - rows.statistics["load_imbalance"])
    return sign(state, rows, uneven, parameters, wording)


def update_growth(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the updates of a weight are far larger, relative to it, than in its own past."""
    wording = _wording(
        "has growing updates", "have growing updates", "the ratio of update to weight", parameters
    )
    return sign(state, rows, rows.statistics["update_ratio"], parameters, wording)


def noise_growth(state: State, rows: TensorRows, parameters: Parameters) -> Result:
    """Open when the error of a tensor's quantisation, relative to the tensor, is far above its own past."""
    with np.errstate(invalid="ignore", divide="ignore"):
        noise = rows.statistics["sq_error"] / rows.statistics["sq_signal"]
    wording = _wording("loses precision", "lose precision", "the noise-to-signal ratio", parameters)
    return sign(state, rows, noise, parameters, wording)


def _wording(singular: str, many: str, what: str, parameters: Parameters) -> Wording:
    return Wording(
        singular=singular, plural=many,
        amount=lambda octaves, name: f"{what} of {name} is {rounded(2.0**octaves, 3)} times its usual value",
        limit=f"above the limit of {rounded(2.0 ** parameters['octaves'], 3)}", unit="octaves",
    )  # fmt: skip


def sign(state: State, rows: TensorRows, values: Floats, parameters: Parameters, wording: Wording) -> Result:
    """Open when log2 x > m + max(z d, `octaves`) in `points` consecutive observations of a tensor.

    m and d are exponential averages of log2 x and of its absolute deviation from m, with the weight
    1 / `window`. A value enters them no further from m than the limit times CLIP / z (Huber's clipping): a
    drift of up to that over `window` observations is the tensor's own, a faster one is not, and a lasting new
    level becomes the past after some windows.

    Args:
        values: float64[R, n], positive; others are as not observed.
        parameters: `octaves`, in powers of two; `z`; `window`, also the observations from which the past is
            learned before a tensor is judged; `warmup`, those before them, which do not count; `points`,
            `recover`.
    """
    past = PastAverages.restored(state, len(rows.facts.names))
    # Of sampled statistics only the sampled steps are rows, so that `recover` counts them.
    has_value = ~np.isnan(values).all(axis=1)
    over, seen, growth = past.exceeded(values[has_value], parameters)
    observed = ConditionRows(steps=rows.steps[has_value], over=over, seen=seen, values=growth)
    after, findings = tensor_alarm(state, observed, rows.facts.names, parameters, wording)
    return after | past.as_state(), findings


@dataclass
class PastAverages:
    """float32[n] each: the average of log2 x, of its absolute deviation, and the number of observations."""

    mean: Float32s
    deviation: Float32s
    count: Float32s

    @classmethod
    def restored(cls, state: State, n: int) -> PastAverages:
        return cls(*(unpack(state.get(name), n, np.float32(0.0)) for name in ("mean", "deviation", "count")))

    def as_state(self) -> State:
        return {name: pack(getattr(self, name)) for name in ("mean", "deviation", "count")}

    def exceeded(self, values: Floats, parameters: Parameters) -> tuple[Bools, Bools, Floats]:
        """Return whether each value is above the limit, whether it was observed, and octaves above m: [R, n]
        each.

        Row by row, because each observation changes the limit of the next.
        """
        with np.errstate(invalid="ignore"):
            seen = (values > 0) & np.isfinite(values)
        logs = np.log2(np.where(seen, values, 1.0)).astype(np.float32)
        z, octaves, window, warmup = (
            np.float32(parameters[name]) for name in ("z", "octaves", "window", "warmup")
        )
        reach = np.minimum(np.float32(1.0), CLIP / z)
        over, growth = np.zeros(values.shape, bool), np.zeros(values.shape)
        for i in range(len(values)):
            step = logs[i] - self.mean
            limit = np.maximum(z * self.deviation, octaves)
            learned = self.count - warmup
            is_learned = learned >= window
            over[i] = (step > limit) & is_learned & seen[i]
            growth[i] = step
            # The first observations that count do so equally; each of those before replaces the average.
            weight = np.float32(1.0) / np.clip(learned + 1, np.float32(1.0), window)
            weight = np.where(seen[i], weight, np.float32(0.0))
            step = np.where(is_learned, np.clip(step, -reach * limit, reach * limit), step)
            self.mean += weight * step
            size = np.where(learned > 0, np.abs(step), np.float32(0.0))
            self.deviation += weight * (size - self.deviation)
            self.count += seen[i]
        return over, seen, growth
