"""The baseline's own health: whether the BF16 runs can be compared with at all. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8scope_dashboard.diagnosis.curves import Trouble, troubles
from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding
from fp8scope_dashboard.diagnosis.reference import RunLoss, describe


@dataclass(frozen=True)
class BaselineHealth:
    """The finding of this step, and the BF16 runs to compare with."""

    finding: Finding
    usable: tuple[RunLoss, ...]


def examine(run: RunLoss, baselines: Sequence[RunLoss]) -> BaselineHealth:
    """Judge each BF16 run by its own loss.

    A BF16 run in lasting trouble that the FP8 run does not have is not usable: against it any run is better.
    If both are in lasting trouble, FP8 is not its cause, which the step 'reference' says; then it is usable.
    """
    arms = [arm for arm in baselines if len(arm.steps)]
    if not arms:
        return BaselineHealth(
            Finding(step="baseline", outcome="unknown", sentence="There is no BF16 run to compare with."), ()
        )
    ours = _lasting(run)
    sick = [] if ours is not None else [(arm, bad) for arm in arms if (bad := _lasting(arm)) is not None]
    if not sick:
        last = max(int(arm.steps[-1]) for arm in arms)
        both = " It is in the same trouble as the FP8 run." if any(map(_lasting, arms)) else ""
        counted = f"{len(arms)} BF16 run{'s' if len(arms) > 1 else ''}"
        sentence = f"No trouble of the baseline alone ({counted}, up to step {last:,}).{both}"
        return BaselineHealth(Finding(step="baseline", outcome="clear", sentence=sentence), tuple(arms))
    names = {arm.name for arm, _ in sick}
    usable = tuple(arm for arm in arms if arm not in [bad for bad, _ in sick])
    arm, bad = sick[0]
    links = tuple(EvidenceLink("run", run.name, {"run": run.run}) for run, _ in sick[:3])
    what = f"the BF16 run {arm.name} is in trouble, and the FP8 run is not: {describe(bad)}"
    if usable:
        rest = f"It is left out; {len(usable)} of {len(arms)} BF16 runs are healthy."
        sentence = f"{what[:1].upper()}{what[1:]}. {rest}"
        return BaselineHealth(
            Finding(step="baseline", outcome="clear", sentence=sentence, onset=bad.onset, links=links), usable
        )
    more = f" So are {len(names) - 1} more." if len(names) > 1 else ""
    sentence = f"Not FP8: {what}.{more} A comparison with it says nothing about FP8."
    return BaselineHealth(
        Finding(
            step="baseline",
            outcome="not_fp8",
            sentence=sentence,
            cause="baseline",
            onset=bad.onset,
            tensors=(),
            suggestion="Find out why the BF16 run failed, and compare with a healthy one.",
            links=links,
        ),
        (),
    )


def _lasting(curve: RunLoss) -> Trouble | None:
    """The first trouble that lasts to the end of a run."""
    if not np.isfinite(curve.losses).any():
        return Trouble("not_finite", int(curve.steps[0]), None, np.inf)
    return next((trouble for trouble in troubles(curve.steps, curve.losses) if trouble.lasts), None)
