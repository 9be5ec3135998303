"""The quantities of stored runs: what was read, in the form that `quantities` computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8scope_dashboard.analysis.quantities import LossSpread, MeasuredRun, MeasuredScalar, of
from fp8scope_dashboard.analysis.reading import RunReading
from fp8scope_dashboard.runs.models import Run


def quantities_of(
    run: Run, ours: Sequence[RunReading], theirs: Sequence[RunReading], losses: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the run costs and saves against its baseline; see `quantities.of`.

    Args:
        ours: of the run first, then of others of its seed group.
        losses: the result of the comparison of the losses.
    """
    return of(
        [measured(reading) for reading in ours],
        [measured(reading) for reading in theirs],
        level=1.0 - run.project.alpha,
        spread=_spread(losses),
        subject=run.precision.upper() if run.precision in ("fp8", "fp16", "fp32") else "This run",
    )


def measured(reading: RunReading) -> MeasuredRun:
    """Return what was read in the form that the quantities are computed from."""
    scalars = {name: MeasuredScalar(means.ends, means.means) for name, means in reading.scalars.items()}
    return MeasuredRun(
        MeasuredScalar(reading.curve.steps, reading.curve.losses), reading.curve.tokens, scalars
    )


def _spread(losses: Mapping[str, Any]) -> LossSpread | None:
    """The spread between seeds that the verdict used, in the unit of the loss."""
    stored, baseline = losses.get("seed_spread") or {}, losses.get("baseline_loss")
    value, relative = stored.get("value"), losses.get("unit", "relative") == "relative"
    if not value or (relative and not baseline):
        return None
    return LossSpread(abs(value * baseline) if relative else value, float(stored.get("freedom") or 3.0))
