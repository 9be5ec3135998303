"""A loss that is not finite although no tensor is: it comes from the code after the layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8scope_dashboard.diagnosis.curves import Trouble
from fp8scope_dashboard.diagnosis.findings import Finding
from fp8scope_dashboard.diagnosis.tensors import TensorSeries

# Rows before the loss in which the tensors must be observed.
ROWS = 4


def examine(own: Sequence[Trouble], rows: TensorSeries | None) -> Finding | None:
    """A finding if the run's first trouble is a loss that is not finite, and the tensors were until then.

    The inputs and weights of that step must be finite and in their range, and the gradients of the steps
    before it: those of the step itself already come from the loss. None if that is not known.
    """
    if not own or own[0].kind != "not_finite" or rows is None:
        return None
    onset = own[0].onset
    before = rows.steps < onset
    here = rows.steps == onset
    forward = rows.roles != "grad_output"
    if int(before.sum()) < ROWS or not here.any() or not forward.any():
        return None
    until, seen = before | here, np.isfinite(rows.nonfinite)
    if not seen[forward][:, here].any() or not seen[:, before].any():
        return None
    bad = np.nan_to_num(rows.nonfinite) > 0
    clipped = np.nan_to_num(rows.share(rows.saturated)) > 0.05
    recent = until & (rows.steps > rows.steps[until][-min(16, int(until.sum()))])
    if bad[forward][:, until].any() or bad[~forward][:, before].any() or clipped[:, recent].any():
        return None
    sentence = (
        f"Not FP8: the loss is not finite from step {onset:,} on, while the inputs and weights of that step "
        f"({int(forward.sum())} tensors observed) and all gradients before it are finite and in their range. "
        "So the loss itself, or a layer that is not observed, makes the first NaN or infinity."
    )
    return Finding(
        step="reference",
        outcome="not_fp8",
        sentence=sentence,
        cause="loss_code",
        onset=onset,
        tensors=(),
        suggestion="Check the code of the loss: logarithms and divisions by zero, empty masks, and the "
        "labels of this step's batch.",
    )
