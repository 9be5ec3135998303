"""Saturated and non-finite elements over many tensors, reported as one condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import NAMED, Finding, State, percent
from fp8scope_dashboard.text.numbers import count

Floats = NDArray[np.float64]
Parameters = Mapping[str, float]

# In rows. An agent within its overhead budget observes plain tensors at least this often.
LONGEST_GAP = 100


def overflow_rates(saturated: Floats, nonfinite: Floats | None, numel: Floats) -> Floats:
    """(saturated + nonfinite) / numel, float64[R, n]; NaN where a tensor is empty or was not observed."""
    count = saturated if nonfinite is None else saturated + np.where(np.isnan(nonfinite), 0.0, nonfinite)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(numel > 0, count / numel, np.nan)


def saturation(
    state: State, steps: NDArray[np.int64], rates: Floats, names: Sequence[str], parameters: Parameters
) -> tuple[State, list[Finding]]:
    """Open when the rate of a tensor is above `rate` in `points` consecutive observations.

    Args:
        steps: int64[R]; steps that are not above the last one are ignored.
        rates: float64[R, n], see `overflow_rates`. NaN (not observed) does not change a tensor's count.
        names: n names; later calls may add columns but not move them.
        parameters: `rate`; `points` in observations; `warmup`, the steps from the first one that are ignored
            because scales are not settled; `recover` in rows.

    There is one finding for all tensors; further tensors that saturate while it is open do not open another.
    Closes when no tensor was above for `recover` rows. Rows in which a tensor that was above is not observed
    do not count, up to LONGEST_GAP of them.
    """
    state = {"last_step": None, "first_step": None, "open": False, "calm": 0, "gap": 0, "counts": {}, **state}
    counts, onsets, peaks = _dense(state["counts"], len(names))
    findings = []
    for step, row in zip(steps.tolist(), rates, strict=True):
        if state["last_step"] is not None and step <= state["last_step"]:
            continue
        state["last_step"] = step
        if state["first_step"] is None:
            state["first_step"] = step
        if step - state["first_step"] < parameters["warmup"]:
            continue
        over = row > parameters["rate"]
        unseen = bool((np.isnan(row) & (counts > 0)).any())
        state["gap"] = state["gap"] + 1 if unseen else 0
        counts[row <= parameters["rate"]] = 0
        onsets[over & (counts == 0)] = step
        peaks[over & (counts == 0)] = 0.0
        counts[over] += 1
        peaks[over] = np.maximum(peaks[over], row[over])
        finding = _transition(state, step, over, counts, onsets, peaks, names, parameters)
        if finding:
            findings.append(finding)
    state["counts"] = {
        str(i): [int(counts[i]), int(onsets[i]), float(peaks[i])] for i in np.flatnonzero(counts).tolist()
    }
    return state, findings


def _dense(sparse: dict[str, list[Any]], n: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    counts, onsets, peaks = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
    for key, remembered in sparse.items():
        counts[int(key)], onsets[int(key)], peaks[int(key)] = remembered
    return counts, onsets, peaks


def _transition(
    state: State,
    step: int,
    over: NDArray[np.bool_],
    counts: NDArray[np.int64],
    onsets: NDArray[np.int64],
    peaks: Floats,
    names: Sequence[str],
    parameters: Parameters,
) -> Finding | None:
    if state["open"]:
        if over.any():
            state["calm"] = 0
        elif not 0 < state["gap"] <= LONGEST_GAP:
            state["calm"] += 1
        if state["calm"] < parameters["recover"]:
            return None
        state["open"] = False
        # The old counts of tensors that are no longer observed must not open it again.
        counts[:] = 0
        return Finding(False, state["onset"], step)
    sure = counts >= parameters["points"]
    if not sure.any():
        return None
    onset = int(onsets[sure].min())
    state.update(open=True, calm=0, onset=onset)
    # All tensors above the rate belong to the condition, even if their count is below `points`.
    clipping = np.flatnonzero(counts > 0)
    worst = clipping[np.argsort(-peaks[clipping], kind="stable")][:NAMED].tolist()
    tensors = [{"name": names[i], "rate": float(peaks[i]), "onset_step": int(onsets[i])} for i in worst]
    others = f"; {count(len(clipping) - 1, 'more tensor')} above it" if len(clipping) > 1 else ""
    message = (
        f"{percent(float(peaks[worst[0]]))} of {names[worst[0]]} overflowed since step {onset}, above the "
        f"limit of {percent(parameters['rate'])}{others}."
    )
    evidence = {"tensors": tensors, "tensors_over": len(clipping)}
    return Finding(True, onset, step, float(peaks[worst[0]]), float(parameters["rate"]), message, evidence)
