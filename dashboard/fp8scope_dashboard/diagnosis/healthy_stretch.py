"""The steps of a run before its loss broke: what is measured later says nothing about a working training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fp8scope_dashboard.analysis.run_readiness import Sampled, sampled_tensors
from fp8scope_dashboard.diagnosis.curves import troubles
from fp8scope_dashboard.telemetry import queries

POINTS: Final = 20_000


@dataclass(frozen=True)
class Judged:
    """The tensors to judge.

    Attributes:
        note: a sentence if the last sampled step is left out or lies in a broken stretch; else empty.
    """

    sampled: Sampled
    note: str = ""


def broken_from(run_id: UUID) -> int | None:
    """The first step from which the loss is broken to the run's end; None if it is healthy."""
    loss = queries.scalar(run_id, "loss", points=POINTS, timed=False)
    return next((trouble.onset for trouble in troubles(loss.steps, loss.values) if trouble.lasts), None)


def tensors_to_judge(run_id: UUID, step: int | None = None) -> Judged | None:
    """The operands in a sampled step: the last one at or before `step`; without it, the last healthy one.

    None if no step was sampled.
    """
    broken = broken_from(run_id)
    if step is None and broken is not None:
        healthy = sampled_tensors(run_id, broken - 1)
        if healthy is not None:
            note = f"The loss is broken from step {broken:,} on, so that later steps are not judged."
            return Judged(healthy, note)
    sampled = sampled_tensors(run_id, step)
    if sampled is None:
        return None
    if broken is None or sampled.step < broken:
        return Judged(sampled)
    note = (
        f"The loss is broken from step {broken:,} on: this step does not say what a working training needs."
    )
    return Judged(sampled, note)
