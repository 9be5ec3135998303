"""Ranks: communication, those that others wait for, and those that have nothing to do."""

from statistics import median
from typing import Final

from fp8scope.advice.finding import AdviceFinding, Gain, percent
from fp8scope.advice.record import RankRecord, RunRecord

MIN_SHARE: Final = 0.2
SLOWER: Final = 1.25
IDLE: Final = 0.6
"""A rank with so small a part of the most operations of a rank is partly idle."""
FEWER_BYTES: Final = (0.25, 0.65)
"""Source: Peng et al. 2023 (FP8-LM): 63 to 65 % fewer bytes with gradients in FP8."""


def _busy(rank: RankRecord) -> float:
    """Return the seconds of a step in which the rank does not wait for others."""
    return float((rank.seconds - rank.part("communication")).mean())


def _operations(rank: RankRecord) -> float:
    """Return the model's operations of a step on this rank; 0 if they are unknown."""
    rates = rank.values("model_flops_per_second")
    return float(median(rates)) * float(rank.seconds.mean()) if len(rates) else 0.0


def communication(run: RunRecord) -> AdviceFinding | None:
    """Steps that wait for collectives: for their bytes, or for a slower rank."""
    if len(run.ranks) < 2 or not all(rank.is_measured for rank in run.ranks) or idle_ranks(run) is not None:
        return None
    share = run.typical("communication")
    slowest = max(run.ranks, key=_busy)
    others = median(_busy(rank) for rank in run.ranks if rank is not slowest)
    most = max(rank.share("communication") for rank in run.ranks)
    if others > 0 and _busy(slowest) > SLOWER * others and most >= MIN_SHARE / 2:
        high = 1 - others / _busy(slowest)
        return AdviceFinding(
            practice="communication",
            title=f"The other ranks wait for rank {slowest.rank}",
            evidence=f"Rank {slowest.rank} works {1000 * _busy(slowest):.1f} ms a step, the others "
            f"{1000 * others:.1f} ms (median); they wait up to {percent(most)} of the time.",
            gain=Gain(
                low=high / 2,
                high=high,
                formula="(1 - m/w) / 2 to 1 - m/w: w the slowest rank's work in a step, m that of others",
            ),
            change="Give each rank equal work (batches of equal tokens), and look at that host: clocks, "
            "other processes, its loader.",
        )
    if share < MIN_SHARE:
        return None
    low, high = (share * part for part in FEWER_BYTES)
    return AdviceFinding(
        practice="communication",
        title="The training waits for communication",
        evidence=f"Collectives take {percent(share)} of the steps' time (median of {len(run.ranks)} ranks), "
        "after what backward passes hide of them.",
        gain=Gain(
            low=low,
            high=high,
            formula="x q: x the share of communication in the step, q = 25 to 65 % the bytes saved (BF16 or "
            "FP8 gradients, fewer reductions)",
        ),
        change="Reduce once a step (no_sync in all micro-batches but the last), in buckets that overlap with "
        "the backward pass (DistributedDataParallel), in BF16 or FP8 (fp8scope's Fp8GradientReducer).",
    )


def idle_ranks(run: RunRecord) -> AdviceFinding | None:
    """Ranks with little work, or devices that no rank uses."""
    work = {rank.rank: _operations(rank) for rank in run.ranks if rank.is_measured}
    most = max(work.values(), default=0.0)
    idle = {rank: operations for rank, operations in work.items() if 0 < operations < IDLE * most}
    if len(run.ranks) < 2 or not idle:
        return None
    lost = sum(1 - operations / most for operations in idle.values()) / len(work)
    smallest = min(idle.values()) / most
    ranks = ", ".join(str(rank) for rank in sorted(idle))
    return AdviceFinding(
        practice="idle_ranks",
        title="Ranks are idle",
        evidence=f"Rank {ranks} computes {percent(smallest)} of the operations of the busiest rank in a "
        f"step, and waits {percent(max(rank.share('communication') for rank in run.ranks))} of the time.",
        gain=Gain(
            low=lost / 2,
            high=lost,
            formula="l / 2 to l, the mean over ranks of 1 - o/p: o a rank's operations in a step, p those of "
            "the busiest",
        ),
        change="Divide the batch evenly (DistributedSampler, drop_last=True), or start fewer ranks.",
    )
