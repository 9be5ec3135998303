"""Which tensors clip? Rates of saturated and non-finite elements over many tensors, told as one condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import Finding, State, percent
from fp8scope_dashboard.text.verdicts import count

Floats = NDArray[np.float64]
Parameters = Mapping[str, float]

# Tensors named in the evidence; the message names the worst.
NAMED = 10
# Rows: an agent that keeps inside its budget reads plain tensors at least this often.
LONGEST_GAP = 100


def overflow_rates(saturated: Floats, nonfinite: Floats | None, numel: Floats) -> Floats:
    """(saturated + nonfinite) / numel, float64[R, n]; NaN where a tensor was not observed or is empty."""
    count = saturated if nonfinite is None else saturated + np.where(np.isnan(nonfinite), 0.0, nonfinite)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(numel > 0, count / numel, np.nan)


def saturation(
    state: State, steps: NDArray[np.int64], rates: Floats, names: Sequence[str], parameters: Parameters
) -> tuple[State, list[Finding]]:
    """Open when a tensor's rate is above `rate` in `points` consecutive observations; one finding for all.

    Args:
        steps: int64[R]; a step that is not above the last one is ignored.
        rates: float64[R, n], see `overflow_rates`. NaN (not observed) leaves a tensor's count as it is.
        names: n names; columns may be added in later calls, never moved.
        parameters: `rate`; `points` in observations; `warmup` in steps from the first one seen, ignored,
            because scales are not settled; `recover` in rows.

    A delayed scale's isolated first step cannot reach `points`. Closes when for `recover` rows no tensor was
    above; rows in which a tensor that was above is not observed do not count, up to LONGEST_GAP of them.
    Further tensors that clip while the condition is open open no second one.
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
        found = _transition(state, step, over, counts, onsets, peaks, names, parameters)
        if found:
            findings.append(found)
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
        # What is observed no more must not open it again with what it was.
        counts[:] = 0
        return Finding(False, state["onset"], step)
    sure = counts >= parameters["points"]
    if not sure.any():
        return None
    onset = int(onsets[sure].min())
    state.update(open=True, calm=0, onset=onset)
    # What clips at this moment belongs to the same condition, also where its count is short of `points`.
    clipping = np.flatnonzero(counts > 0)
    worst = clipping[np.argsort(-peaks[clipping], kind="stable")][:NAMED].tolist()
    tensors = [{"name": names[i], "rate": float(peaks[i]), "onset_step": int(onsets[i])} for i in worst]
    others = f", and {count(len(clipping) - 1, 'more tensor')} above it" if len(clipping) > 1 else ""
    message = (
        f"{percent(float(peaks[worst[0]]))} of {names[worst[0]]} overflowed since step {onset}, where "
        f"{percent(parameters['rate'])} is allowed{others}."
    )
    evidence = {"tensors": tensors, "tensors_over": len(clipping)}
    return Finding(True, onset, step, float(peaks[worst[0]]), float(parameters["rate"]), message, evidence)
