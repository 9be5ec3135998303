"""Scales that differ between ranks which used to agree.

Ranks that reduce their amaxes (delayed scaling in data parallel training), and replicas of a weight, have the
same scales. Ranks that scale their own batches never do. So a tensor is judged only once its ranks have
agreed for a while: then a difference means that a reduction is missing or that replicas have diverged.

The card of ranks on the run's page measures the difference with `spread_of`, too, and from the same limit on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.arrays import pack, unpack
from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State
from fp8scope_dashboard.alerts.detectors.tensor_alarm import ConditionRows, Wording, tensor_alarm
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import as_factor

Int64s = NDArray[np.int64]
Parameters = Mapping[str, float]

# Steps between two comparisons.
EVERY = 10
# Compared steps of a rank that wait for the other ranks in the stored state; of more, the oldest are dropped.
MAX_WAITING = 8
# In powers of two: 2 %, far above the rounding of float32.
EQUAL = 0.03


def scale_disagreement(
    state: State,
    rows: Mapping[int, tuple[Int64s, Floats]],
    ranks: Sequence[int],
    names: Sequence[str],
    parameters: Parameters,
) -> tuple[State, list[ConditionChange]]:
    """Open when ranks have different scales in `points` comparisons, after `agreed` in which they agreed.

    Compares the steps that are divisible by EVERY, once all ranks have sent them.

    Args:
        rows: by rank, new steps int64[R] and scales float64[R, n], NaN where not observed.
        ranks: all ranks that train.
        names: n names; later calls may add columns but not move them.
        parameters: `agreed`, `points` and `recover`, in comparisons; `octaves`, the least difference.
    """
    n = len(names)
    waiting = _waiting(state, rows, n)
    common = set.intersection(*(set(waiting.get(rank, {})) for rank in ranks)) if ranks else set()
    steps = np.array(sorted(common), np.int64)
    # Steps before the last comparison are no longer waited for.
    done = int(steps[-1]) if len(steps) else state.get("compared", -1)
    spread = np.full((len(steps), n), np.nan)
    for i, step in enumerate(steps.tolist()):
        scales = np.stack([waiting[rank][step] for rank in ranks])
        # A tensor that a rank has not observed, or that was empty there, is not compared.
        spread[i] = np.where((scales > 0).all(axis=0), spread_of(scales), np.nan)
    over, agreed = _disagreeing(unpack(state.get("agreed"), n, np.int64(0)), spread, parameters)
    wording = Wording(
        singular="has different scales on the ranks", plural="have different scales on the ranks",
        amount=lambda octaves, name: f"those of {name} differ by a factor of {as_factor(octaves)}",
        limit="after they agreed", unit="octaves",
    )  # fmt: skip
    observed = ConditionRows(steps=steps, over=over, seen=~np.isnan(spread), values=spread)
    after, findings = tensor_alarm(state, observed, names, parameters, wording)
    packed = {
        str(rank): {
            str(step): pack(np.asarray(row, np.float32))
            for step, row in sorted(of_rank.items())[-MAX_WAITING:]
            if step > done
        }
        for rank, of_rank in waiting.items()
        if rank in ranks
    }
    return {**after, "agreed": pack(agreed), "compared": done, "waiting": packed}, findings


def _waiting(
    state: State, rows: Mapping[int, tuple[Int64s, Floats]], n: int
) -> dict[int, dict[int, NDArray[np.float32]]]:
    """By rank and step, the scales that have not been compared: float32[n]."""
    waiting = {
        int(rank): {int(step): unpack(text, n, np.float32(np.nan)) for step, text in of_rank.items()}
        for rank, of_rank in state.get("waiting", {}).items()
    }
    for rank, (steps, scales) in rows.items():
        of_rank = waiting.setdefault(rank, {})
        for i in np.flatnonzero((steps % EVERY == 0) & (steps > state.get("compared", -1))).tolist():
            row = np.full(n, np.nan, np.float32)
            row[: scales.shape[1]] = scales[i, :n]
            of_rank[int(steps[i])] = row
    return waiting


def spread_of(scales: NDArray[Any]) -> Floats:
    """Return how far apart the ranks' scales of each tensor are, in powers of two: float[ranks, n] to
    float64[n].

    NaN where fewer than two ranks have a positive scale.
    """
    valid = np.isfinite(scales) & (scales > 0)
    logs = np.log2(np.where(valid, scales, 1.0).astype(np.float64))
    high = np.where(valid, logs, -np.inf).max(axis=0)
    low = np.where(valid, logs, np.inf).min(axis=0)
    spread: Floats = np.full(scales.shape[1], np.nan)
    np.subtract(high, low, out=spread, where=valid.sum(axis=0) > 1)
    return spread


def _disagreeing(agreed: Int64s, spread: Floats, parameters: Parameters) -> tuple[NDArray[np.bool_], Int64s]:
    """Return bool[R, n], where ranks differ that agreed before, and int64[n], the agreements."""
    over = np.zeros(spread.shape, bool)
    agreed = agreed.copy()
    with np.errstate(invalid="ignore"):
        equal, different = spread <= EQUAL, spread > parameters["octaves"]
    for i in range(len(spread)):
        over[i] = different[i] & (agreed >= parameters["agreed"])
        # A difference before that shows that the ranks scale for themselves.
        agreed[different[i] & ~over[i]] = 0
        agreed[equal[i]] += 1
    return over, agreed
