"""Findings about tensors that leave their range though their scales follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fp8scope_dashboard.diagnosis.findings import Finding
from fp8scope_dashboard.diagnosis.scaling.affected import (
    SHOWN,
    bad_layer,
    counted,
    first_leaving,
    names_of,
    only_module,
    tensor_links,
)
from fp8scope_dashboard.diagnosis.scaling.range_use import Leaving
from fp8scope_dashboard.diagnosis.scaling.scale_faults import (
    ScaleFault,
)
from fp8scope_dashboard.diagnosis.scaling.training import Training
from fp8scope_dashboard.diagnosis.tensors import Scaling, TensorSeries

# Share of the gradients that underflow, or of all tensors that saturate, from which it is not a few layers.
MOST: Final = 0.5
# Scales that follow a margin of 0 or more clamp some elements: below this share only if the run is worse.
HARMFUL_SHARE: Final = 0.05


def of_ranges(
    saturated: Sequence[Leaving],
    flushed: Sequence[Leaving],
    rows: TensorSeries,
    scalings: Mapping[str, Scaling],
    training: Training,
) -> Finding | None:
    """Gradients or operands that vanish, or operands that saturate, in enough elements to be a cause."""
    gradients = int((rows.roles == "grad_output").sum())
    # A head's gradients have tiny probabilities that may vanish without harm: one such tensor is no cause.
    vanishing = [leaving for leaving in flushed if rows.tensors[leaving.tensor].role == "grad_output"]
    if gradients >= 1 and len(vanishing) >= max(2, MOST * gradients):
        return _underflow(vanishing, gradients, rows)
    forward = [leaving for leaving in flushed if rows.tensors[leaving.tensor].role != "grad_output"]
    if forward:
        return _of_forward(forward, rows, scalings)
    if not saturated:
        return None
    positions = [leaving.tensor for leaving in saturated]
    share = max(leaving.share for leaving in saturated)
    margins = {scalings[rows.tensors[p].role].margin for p in positions}
    in_trouble = training.is_worse or training.trouble_at is not None
    if min(margins) >= 0 and share < HARMFUL_SHARE and not in_trouble:
        return None
    module = only_module(positions, rows)
    if module:
        name, first = rows.tensors[positions[0]].name, first_leaving(saturated[0], rows)
        what = f"up to {share:.1%} of {name} saturates, {first}"
        bad = bad_layer(module, saturated[0].onset, what, positions, rows, "saturation_rate")
        return replace(bad, earliest=saturated[0].after + 1)
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"The margin is too small ({min(margins):.0f}): up to {share:.1%} of the elements of "
        f"{counted(positions, rows)} saturate, {first_leaving(saturated[0], rows)}, though the scales follow "
        "the recipe.",
        cause="margin", onset=saturated[0].onset, tensors=names_of(positions, rows),
        suggestion="Use a margin of 1 or more, or current scaling, which needs no head room.",
        links=tensor_links(positions, rows, "saturation_rate"), earliest=saturated[0].after + 1,
    )  # fmt: skip


def of_static_gradients(
    faults: Mapping[int, ScaleFault], flushed: Sequence[Leaving], rows: TensorSeries
) -> Finding | None:
    """Gradients whose scale never moved in the whole run, and which underflow: no scaling at all."""
    static = [p for p, fault in faults.items() if fault.kind == "frozen" and fault.first <= SHOWN]
    if len(static) < len(faults) or any(rows.tensors[p].role != "grad_output" for p in static):
        return None
    vanishing = [leaving for leaving in flushed if leaving.tensor in static]
    return _underflow(vanishing, len(static), rows) if vanishing else None


def _underflow(vanishing: Sequence[Leaving], gradients: int, rows: TensorSeries) -> Finding:
    positions = [leaving.tensor for leaving in vanishing]
    share = float(np.median([leaving.share for leaving in vanishing]))
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"The gradients underflow: {share:.0%} of the elements of {len(positions)} of {gradients} "
        f"grad_output tensors become zero, {first_leaving(vanishing[0], rows)}.",
        cause="underflow", onset=vanishing[0].onset, tensors=names_of(positions, rows),
        suggestion="Use E5M2 or block scaling for the gradients, or a larger loss scale.",
        links=tensor_links(positions, rows, "underflow_rate"), earliest=vanishing[0].after + 1,
    )  # fmt: skip


def _of_forward(
    forward: Sequence[Leaving], rows: TensorSeries, scalings: Mapping[str, Scaling]
) -> Finding | None:
    """Inputs and weights that become zero: one layer's, or under a margin that is too large."""
    positions = [leaving.tensor for leaving in forward]
    share = max(leaving.share for leaving in forward)
    module = only_module(positions, rows)
    if module:
        name = rows.tensors[positions[0]].name
        what = f"{share:.0%} of the elements of {name} become zero, {first_leaving(forward[0], rows)}"
        bad = bad_layer(module, forward[0].onset, what, positions, rows, "underflow_rate")
        return replace(bad, earliest=forward[0].after + 1)
    margin = max(scalings[rows.tensors[p].role].margin for p in positions)
    if margin <= 0:
        return None
    return Finding(
        step="scaling", outcome="cause",
        sentence=f"The margin is too large ({margin:.0f}): up to {share:.0%} of the elements of "
        f"{counted(positions, rows)} become zero, {first_leaving(forward[0], rows)}.",
        cause="margin_too_large", onset=forward[0].onset, tensors=names_of(positions, rows),
        suggestion="Set the margin to 0.",
        links=tensor_links(positions, rows, "underflow_rate"), earliest=forward[0].after + 1,
    )  # fmt: skip
