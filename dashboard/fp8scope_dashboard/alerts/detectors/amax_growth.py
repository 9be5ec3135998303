"""Amaxes that grow over thousands of steps: the late outliers of SwiGLU layers.

Fishman et al., "Scaling FP8 training to trillion-token LLMs" (2024), show that the weights of SwiGLU align
late in training, so that its product grows by orders of magnitude in a few layers and leaves the range.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.arrays import pack, unpack
from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State
from fp8scope_dashboard.alerts.detectors.tensor_alarm import ConditionRows, Wording, tensor_alarm
from fp8scope_dashboard.alerts.detectors.tensor_rows import TensorRows
from fp8scope_dashboard.text.numbers import rounded

Parameters = Mapping[str, float]
Float32s = NDArray[np.float32]

# Observations over which the lowest level is forgotten.
FORGET = 20_000


def amax_growth(
    state: State, rows: TensorRows, parameters: Parameters
) -> tuple[State, list[ConditionChange]]:
    """Open when the level of an amax has grown by more than `octaves` powers of two more than its peers'.

    The level is an exponential average of log2(amax) over `span` observations. Its growth is its distance
    from the lowest level since the first `warmup` observations; the lowest level follows with the weight
    1 / FORGET. What the tensors of the same role have in common is subtracted, see `_typical`: a loss scale
    that doubles and a warm-up of the learning rate move all alike.

    Args:
        rows: `amax`.
        parameters: `octaves`, `span`, `warmup`, `points`, `recover`.
    """
    amax = rows.statistics["amax"]
    n = len(rows.facts.names)
    with np.errstate(invalid="ignore", divide="ignore"):
        seen = (amax > 0) & np.isfinite(amax)
        logs = np.log2(np.where(seen, amax, 1.0)).astype(np.float32)
    level, lowest, count = (
        unpack(state.get(name), n, np.float32(0.0)) for name in ("level", "lowest", "count")
    )
    peers = _peers(rows.facts.roles)
    octaves, span, warmup = (np.float32(parameters[name]) for name in ("octaves", "span", "warmup"))
    over = np.zeros(seen.shape, bool)
    growth = np.zeros(seen.shape, np.float32)
    leak = np.float32(1.0 / FORGET)
    for i in range(len(rows.steps)):
        # The first observations count equally.
        weight = np.where(seen[i], np.float32(1.0) / np.minimum(count + 1, span), np.float32(0.0))
        level = level + weight * (logs[i] - level)
        count = count + seen[i]
        settled = count > warmup
        lowest = np.where(settled, np.minimum(lowest + leak * (level - lowest) * seen[i], level), level)
        own = level - lowest
        if own.max(initial=0.0) <= octaves:
            continue
        growth[i] = own - _typical(own, settled, peers)
        over[i] = (growth[i] > octaves) & settled & seen[i]
    wording = Wording(
        singular="has a growing amax", plural="have growing amaxes",
        amount=lambda octaves, name: f"that of {name} is {rounded(2.0**octaves, 3)} times its lowest level",
        limit=f"above the limit of {rounded(2.0 ** parameters['octaves'], 3)}, relative to its role",
        unit="octaves",
    )  # fmt: skip
    observed = ConditionRows(steps=rows.steps, over=over, seen=seen, values=growth.astype(np.float64))
    after, findings = tensor_alarm(state, observed, rows.facts.names, parameters, wording)
    arrays = {"level": level, "lowest": lowest, "count": count}
    return after | {name: pack(array.astype(np.float32)) for name, array in arrays.items()}, findings


def _peers(roles: NDArray[np.str_]) -> dict[str, NDArray[np.bool_]]:
    """By role, which tensors have it: bool[n]."""
    return {str(role): roles == role for role in np.unique(roles)} if len(roles) else {}


def _typical(own: Float32s, settled: NDArray[np.bool_], peers: dict[str, NDArray[np.bool_]]) -> Float32s:
    """The growth that the tensors of each role have in common.

    That is the median of the settled ones. Of an even number it is the lower one, so that one of two may
    grow. The only tensor of its role has nothing in common with others, unless it is a gradient: then all of
    its growth may be that of the loss scale.
    """
    typical = np.zeros_like(own)
    for role, members in peers.items():
        values = own[members & settled]
        if len(values) > 1 or (len(values) == 1 and "grad" in role):
            middle = (len(values) - 1) // 2
            typical[members] = np.partition(values, middle)[middle]
    return typical
