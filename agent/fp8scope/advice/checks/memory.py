"""The device's memory: room for a larger batch, and fragmentation."""

from typing import Final

from fp8scope.advice.finding import AdviceFinding, Gain, percent
from fp8scope.advice.record import RunRecord

MAX_USED: Final = 0.5
MAX_UTILISATION: Final = 0.8
MAX_MFU: Final = 0.3
MAX_TIMES: Final = 4
"""The batch grows by this factor at most."""
MIN_FRAGMENTED: Final = 0.25
RETRY_SECONDS: Final = (0.01, 0.1)
"""A retry gives all cached memory back to the driver and waits for the device."""


def batch_headroom(run: RunRecord) -> AdviceFinding | None:
    """Memory that a larger batch could use, on a device that is not busy."""
    rank = run.first
    memory = rank.facts.get("memory") or {}
    used = memory.get("reserved_peak", memory.get("allocated_peak", 0.0)) / memory.get("total", float("inf"))
    busy, mfu = rank.values("gpu_utilization"), rank.values("mfu")
    if not rank.is_measured or not used or used > MAX_USED:
        return None
    if len(busy) and busy.mean() < MAX_UTILISATION:
        idle, evidence = (
            1 - float(busy.mean()),
            f"The device is busy {percent(float(busy.mean()))} of the time",
        )
    elif len(mfu) and mfu.mean() < MAX_MFU:
        idle = 1 - float(mfu.mean()) / MAX_MFU
        evidence = f"The model uses {percent(float(mfu.mean()))} of the device's peak"
    else:
        return None
    times = min(MAX_TIMES, int(1 / max(used, 1 / MAX_TIMES)))
    return AdviceFinding(
        practice="batch_size",
        title="The batch could be larger",
        evidence=f"{evidence}, and {percent(used)} of its memory is used at most.",
        gain=Gain(
            low=0.0,
            high=min(idle, 1 - 1 / times),
            formula="0 to min(1 - u, 1 - 1/k): u the share of time in which the device is busy (or MFU over "
            "30 %), k the growth of the batch; per sample, if the learning rate suits the larger batch",
        ),
        change=f"Try a batch {times} times as large, or accumulate less.",
    )


def fragmentation(run: RunRecord) -> AdviceFinding | None:
    """Memory of the allocator that nothing can use, or that it had to give back."""
    rank = run.first
    memory = rank.facts.get("memory") or {}
    retries, reserved = memory.get("retries", 0.0), memory.get("reserved", 0.0)
    lost = memory.get("inactive", 0.0) / reserved if reserved else 0.0
    is_full = memory.get("reserved_peak", 0.0) > 0.8 * memory.get("total", float("inf"))
    if not rank.is_measured or not (retries or (lost >= MIN_FRAGMENTED and is_full)):
        return None
    step, steps = float(rank.seconds.mean()), max(rank.facts.get("steps", 1), 1)
    low, high = (
        min(1.0, retries / steps * seconds / (step + retries / steps * seconds)) for seconds in RETRY_SECONDS
    )
    return AdviceFinding(
        practice="allocator",
        title="The allocator's memory is fragmented",
        evidence=f"{retries:.0f} allocations had to be tried again, and {percent(lost)} of the reserved "
        f"memory ({memory.get('inactive', 0.0) / 2**20:.0f} MiB) lies in pieces between tensors.",
        gain=Gain(
            low=low,
            high=high,
            formula="n p / (t + n p): n retries of a step, p = 10 to 100 ms each, t the step's time; and the "
            "memory itself",
        ),
        change="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or pad batches to few lengths.",
    )
