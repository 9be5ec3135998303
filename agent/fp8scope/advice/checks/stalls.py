"""Time that goes to checkpoints, and time that no part of the anatomy explains."""

from typing import Final

import numpy as np

from fp8scope.advice.finding import AdviceFinding, Gain, percent
from fp8scope.advice.record import RunRecord

MIN_STALL: Final = 0.05
MIN_SAVES: Final = 3
ASYNCHRONOUS: Final = (0.5, 0.95)
"""Share of a save that goes on in the background; the copy of the state to the host remains."""
MIN_UNCLEAR: Final = 0.5
MIN_STEP_SECONDS: Final = 0.005


def checkpoint_stalls(run: RunRecord) -> AdviceFinding | None:
    """Steps that wait for a checkpoint."""
    rank = run.first
    seconds = rank.part("checkpoint")
    saves, share = int((seconds > 0).sum()), rank.share("checkpoint")
    if not rank.is_measured or saves < MIN_SAVES or share < MIN_STALL:
        return None
    low, high = (share * part for part in ASYNCHRONOUS)
    milliseconds = 1000 * float(seconds.sum()) / saves
    return AdviceFinding(
        practice="checkpoints",
        title="Checkpoints stall the training",
        evidence=f"{saves} of {len(seconds)} steps save or load for {milliseconds:.0f} ms each: "
        f"{percent(share)} of the time.",
        gain=Gain(
            low=low,
            high=high,
            formula="k q: k the share of checkpoints in the time, q = 50 to 95 % what the background can do",
        ),
        change="Save less often, or with torch.distributed.checkpoint.async_save. Without it, copy the state "
        "to the host and save it in a thread.",
    )


def unclear_anatomy(run: RunRecord) -> AdviceFinding | None:
    """Most of the time is in no part that the agent can name: a profile would."""
    rank = run.first
    # Without a loader, the time before a forward pass is whatever the script does there.
    unclear = ("rest",) if "loader" in rank.facts else ("rest", "data")
    share = rank.typical_share(*unclear)
    if not rank.is_measured or share < MIN_UNCLEAR:
        return None
    step = float(np.median(rank.seconds))
    if step < MIN_STEP_SECONDS:
        return None
    return AdviceFinding(
        practice="profile",
        title="Most of the time is outside of the training step's known parts",
        evidence=f"{percent(share)} of a step of {1000 * step:.1f} ms (median) is neither in the model, its "
        "loss, the optimizer, a loader, a collective nor a checkpoint.",
        gain=Gain(low=0.0, high=share, formula="0 to the share of that time"),
        change="Profile some steps: torch.profiler.profile(schedule=torch.profiler.schedule(wait=5, "
        "warmup=1, active=3)), its step() after each step, and its export_chrome_trace('trace.json').",
    )
