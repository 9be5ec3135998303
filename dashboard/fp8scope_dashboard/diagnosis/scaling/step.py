"""Step (c): the scaling. Decides which fault of the scales or ranges explains the tensors, if any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8scope_dashboard.diagnosis.findings import Finding
from fp8scope_dashboard.diagnosis.scaling.affected import (
    SHOWN,
    counted,
    first_leaving,
    names_of,
    tensor_links,
)
from fp8scope_dashboard.diagnosis.scaling.layer_findings import of_one_layer
from fp8scope_dashboard.diagnosis.scaling.loss_scale import CommonFactor, common_factor
from fp8scope_dashboard.diagnosis.scaling.range_findings import MOST, of_ranges, of_static_gradients
from fp8scope_dashboard.diagnosis.scaling.range_use import Leaving, flushing, saturating
from fp8scope_dashboard.diagnosis.scaling.scale_faults import (
    MIN_ROWS,
    SEVERAL,
    ScaleFault,
    scale_fault,
)
from fp8scope_dashboard.diagnosis.scaling.scale_findings import of_scales
from fp8scope_dashboard.diagnosis.scaling.training import Training
from fp8scope_dashboard.diagnosis.tensors import Scaling, TensorSeries, scaling_of
from fp8scope_dashboard.text.numbers import count


def examine(
    rows: TensorSeries, recipe: Mapping[str, Any], reference: TensorSeries | None, training: Training
) -> Finding:
    """The finding of this step.

    Args:
        rows: the run's FP8 tensors.
        reference: the tensors of a BF16 run of the same model; None if there is none.
    """
    if not len(rows.steps) or not np.isfinite(rows.scale).any():
        return Finding(
            step="scaling", outcome="unknown", sentence="The run has no FP8 tensor telemetry to look at."
        )
    scalings = {role: scaling_of(recipe, role) for role in set(rows.roles.tolist())}
    faults = scale_faults(rows, scalings)
    saturated, flushed = saturating(rows), flushing(rows)
    factor = common_factor(rows, reference)
    harmful = factor is not None and _harms(factor, rows, saturated, flushed, training)
    if factor is not None and harmful and not _moves_first(faults, rows):
        return _loss_scale(factor, rows, saturated, flushed)
    return (
        of_static_gradients(faults, flushed, rows)
        or of_scales(faults, rows, scalings)
        or of_ranges(saturated, flushed, rows, scalings, training)
        or of_one_layer(rows, reference, training.grown)
        or _clear(rows, scalings, factor, saturated, training)
    )


def scale_faults(rows: TensorSeries, scalings: Mapping[str, Scaling]) -> dict[int, ScaleFault]:
    """By tensor position, the scales that do not follow."""
    faults = {}
    calls = rows.calls
    for position, tensor in enumerate(rows.tensors):
        fault = scale_fault(
            rows.amax[position],
            rows.scale[position],
            tensor.largest,
            scalings[tensor.role],
            begins=rows.begins,
            calls=float(calls[position]),
        )
        if fault is not None and not _is_configured(fault, scalings[tensor.role]):
            faults[position] = fault
    return faults


def _is_configured(fault: ScaleFault, scaling: Scaling) -> bool:
    """Return whether the recipe itself updates scales rarely, which makes less than a factor of two."""
    waits = fault.last - fault.first + 1 if fault.kind == "frozen" else fault.every
    return scaling.interval > 1 and waits <= 2 * scaling.interval and abs(fault.bits) < 1.0


def _moves_first(faults: Mapping[int, ScaleFault], rows: TensorSeries) -> bool:
    """Return whether gradients' scales followed and then stopped: the loss scale only made it visible."""
    gradients = [fault for position, fault in faults.items() if rows.tensors[position].role == "grad_output"]
    return any(fault.kind in ("frozen", "stale") and fault.first > SHOWN for fault in gradients)


def _harms(
    factor: CommonFactor,
    rows: TensorSeries,
    saturated: Sequence[Leaving],
    flushed: Sequence[Leaving],
    training: Training,
) -> bool:
    """Return whether the loss scale does harm.

    It jumps, gradients leave their range, it is not divided out again, or the run is worse than BF16.
    """
    gradients = int((rows.roles == "grad_output").sum())
    leaving = {item.tensor for item in (*saturated, *flushed)}
    outside = sum(rows.tensors[position].role == "grad_output" for position in leaving)
    since = training.norm_bits[training.norm_steps >= factor.onset]
    undivided = bool(len(since)) and float(np.median(since)) * np.sign(factor.bits) >= 0.5 * abs(factor.bits)
    return factor.jumps or undivided or outside >= MOST * gradients or training.is_worse


def _loss_scale(
    factor: CommonFactor, rows: TensorSeries, saturated: Sequence[Leaving], flushed: Sequence[Leaving]
) -> Finding:
    positions = np.flatnonzero(rows.roles == "grad_output").tolist()
    size = f"2^{abs(factor.bits):.0f} times {'larger' if factor.bits > 0 else 'smaller'}"
    leaving = [item for item in (*saturated, *flushed) if rows.tensors[item.tensor].role == "grad_output"]
    then = ""
    if leaving:
        verb = "saturate" if leaving[0].kind == "saturation" else "underflow"
        then = f", and {count(len(leaving), 'gradient')} {verb} together"
    return Finding(
        step="scaling",
        outcome="cause",
        sentence=f"The loss scale is wrong: since step {factor.onset:,} all gradients are {size} than in "
        f"{factor.against}, "
        f"while inputs and weights are not{then}.",
        cause="loss_scale",
        onset=factor.onset,
        tensors=names_of(positions, rows),
        suggestion="Use the loss scale of the BF16 run, and divide it out of the gradients before the "
        "optimizer's step.",
        links=tensor_links(positions, rows, "amax"),
    )


def _clear(
    rows: TensorSeries,
    scalings: Mapping[str, Scaling],
    factor: CommonFactor | None,
    saturated: Sequence[Leaving],
    training: Training,
) -> Finding:
    """Return what was looked at without a fault. It covers only the tensors and steps that were observed."""
    seen = np.isfinite(rows.scale) & (rows.scale > 0) & np.isfinite(rows.amax)
    enough = seen.sum(axis=1) >= MIN_ROWS
    if not enough.any():
        sentence = f"No scale was observed in {MIN_ROWS} steps or more, so that nothing can be said of them."
        return Finding(step="scaling", outcome="unknown", sentence=sentence)
    stated = np.array([scalings[tensor.role].kind in ("delayed", "current") for tensor in rows.tensors])
    stated &= rows.calls <= SEVERAL
    steps = rows.steps[seen.any(axis=0)]
    where = (
        f"{int(enough.sum())} of {count(len(rows.tensors), 'tensor')} in {count(len(steps), 'step')} "
        f"({int(steps[0]):,} to {int(steps[-1]):,}"
    )
    where += f" of {training.last_step:,})" if training.last_step is not None else ")"
    follow = int((enough & stated).sum())
    if follow == int(enough.sum()):
        what = f"All scales that were observed follow their amax: {where}."
    elif follow:
        what = f"{follow} scales follow their amax, and no other one is frozen: {where}."
    else:
        what = f"No scale is frozen: {where}. The recipe states no formula to compare them with."
    note = "" if factor is None else f" A loss scale of 2^{factor.bits:.0f} does no harm."
    if not np.isfinite(rows.saturated).any():
        range_use = " Whether tensors leave their range was not recorded."
    elif not saturated:
        range_use = " None leaves its range."
    else:
        share = max(leaving.share for leaving in saturated)
        tensors = counted([leaving.tensor for leaving in saturated], rows)
        range_use = (
            f" Up to {share:.1%} of the elements of {tensors} saturate, {first_leaving(saturated[0], rows)}; "
            "nothing shows that this does harm."
        )
    return Finding(step="scaling", outcome="clear", sentence=f"{what}{range_use}{note}")
