"""Findings about scales that do not follow their amax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fp8scope_dashboard.diagnosis.findings import Finding
from fp8scope_dashboard.diagnosis.scaling.affected import (
    bad_layer,
    counted,
    names_of,
    observed_before,
    only_module,
    tensor_links,
)
from fp8scope_dashboard.diagnosis.scaling.scale_faults import (
    FaultKind,
    ScaleFault,
)
from fp8scope_dashboard.diagnosis.tensors import Scaling, TensorSeries
from fp8scope_dashboard.text.numbers import as_factor, count
from fp8scope_dashboard.text.onsets import steps_in_words

# A reset history concerns all tensors at one step: at least so many, that agree within two steps.
MIN_RESETS: Final = 3


def of_scales(
    faults: Mapping[int, ScaleFault], rows: TensorSeries, scalings: Mapping[str, Scaling]
) -> Finding | None:
    """A reset of the histories that most tensors share, else the kind of fault that most have."""
    resets = {p: fault for p, fault in faults.items() if fault.kind == "reset"}
    counted = {p: fault for p, fault in faults.items() if fault.kind != "reset"}
    if len(resets) >= MIN_RESETS and len(resets) >= len(counted):
        step, agreeing = _common_step(resets, rows)
        if len(agreeing) >= MIN_RESETS:
            return _reset(step, agreeing, rows)
    if not counted:
        return None
    kinds = Counter(fault.kind for fault in counted.values())
    kind = max(kinds, key=lambda name: (kinds[name], name))
    chosen = {p: fault for p, fault in counted.items() if fault.kind == kind}
    module = only_module(list(counted), rows)
    if kind == "offset":
        return _offset(chosen, rows, scalings, module)
    return _not_matching(kind, chosen, rows, module)


def _common_step(faults: Mapping[int, ScaleFault], rows: TensorSeries) -> tuple[int, list[int]]:
    """The step at which most faults begin, within two rows, and these tensors."""
    first = Counter(fault.first for fault in faults.values())
    start = max(
        first, key=lambda row: sum(number for other, number in first.items() if 0 <= other - row <= 8)
    )
    agreeing = [p for p, fault in faults.items() if 0 <= fault.first - start <= 8]
    return int(rows.steps[start]), agreeing


def _reset(step: int, positions: Sequence[int], rows: TensorSeries) -> Finding:
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"The amax histories were reset at step {step:,}: the scales of "
        f"{count(len(positions), 'tensor')} were made only from the steps after it, not from their "
        "whole history.",
        cause="history_reset",
        onset=step,
        tensors=names_of(positions, rows),
        suggestion="Save and load the scaling state (scale, amax history, number of calls) with the "
        "checkpoint.",
        links=tensor_links(positions, rows, "scale"),
        is_proven=True,
    )


def _not_matching(
    kind: FaultKind, faults: Mapping[int, ScaleFault], rows: TensorSeries, module: str
) -> Finding:
    order = sorted(faults, key=lambda p: (faults[p].first, -abs(faults[p].bits)))
    worst = max(faults, key=lambda p: abs(faults[p].bits))
    fault, onset = faults[worst], int(rows.steps[faults[order[0]].first])
    after = observed_before(rows.scale[order[0]], onset, rows)
    since = steps_in_words(onset, after)
    whose = f"{counted(order, rows)}, first {rows.tensors[order[0]].name},"
    if kind == "frozen":
        until = "" if fault.lasts else f" until step {int(rows.steps[fault.last]):,}"
        what = (
            f"The scales of {whose} are frozen: constant from step {since} on{until}, stale while the amax "
            f"moved by a factor of up to {as_factor(abs(fault.bits))}"
        )
        cause, suggestion = (
            "frozen_scale",
            "Find what stops the update of the scales, for example at a resume.",
        )
    else:
        how = f"they lag by {fault.lag} steps" if fault.lag else "they do not fit the amax of the last steps"
        if fault.every:
            how = f"they change only every {fault.every} steps"
        what = (
            f"The scales of {whose} are stale since step {since}: {how}, and are off by a factor of up to "
            f"{as_factor(abs(fault.bits))}"
        )
        cause, suggestion = (
            "stale_scale",
            "Update the scales in every step, and load the state of the same checkpoint.",
        )
    if module:
        bad = bad_layer(module, onset, f"{what[0].lower()}{what[1:]}", order, rows, "scale")
        return replace(bad, is_proven=True, earliest=after + 1)
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"{what}.",
        cause=cause,
        onset=onset,
        tensors=names_of(order, rows),
        suggestion=suggestion,
        links=tensor_links(order, rows, "scale"),
        is_proven=True,
        earliest=after + 1,
    )


def _offset(
    faults: Mapping[int, ScaleFault], rows: TensorSeries, scalings: Mapping[str, Scaling], module: str
) -> Finding:
    order = sorted(faults, key=lambda p: (faults[p].first, -abs(faults[p].bits)))
    bits = float(np.median([faults[p].bits for p in order]))
    onset = int(rows.steps[faults[order[0]].first])
    after = observed_before(rows.scale[order[0]], onset, rows)
    side = (
        "too large, so that large values saturate" if bits < 0 else "too small, so that small values vanish"
    )
    what = (
        f"the scales of {counted(order, rows)} are {as_factor(abs(bits))} times {side}, since step "
        f"{steps_in_words(onset, after)}"
    )
    if module:
        bad = bad_layer(module, onset, what, order, rows, "scale")
        return replace(bad, is_proven=True, earliest=after + 1)
    gradients = all(rows.tensors[p].role == "grad_output" for p in order)
    margin = scalings[rows.tensors[order[0]].role].margin + bits
    cause = "margin" if bits < 0 else "underflow" if gradients else "margin_too_large"
    if cause == "underflow":
        what = f"the gradients underflow: {what}"
    else:
        what = f"the margin is too {'small' if bits < 0 else 'large'} (effectively {margin:.0f}): {what}"
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"{what[0].upper()}{what[1:]}.",
        cause=cause,
        onset=onset,
        tensors=names_of(order, rows),
        suggestion="Set the margin to 0 or more, or use current scaling."
        if bits < 0
        else "Set the margin to 0.",
        links=tensor_links(order, rows, "scale"),
        is_proven=True,
        earliest=after + 1,
    )
