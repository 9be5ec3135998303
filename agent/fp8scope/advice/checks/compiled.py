"""Compilation: breaks in the graph, and a model of many small operations that is not compiled."""

from typing import Final

from fp8scope.advice.finding import AdviceFinding, Gain, percent
from fp8scope.advice.record import RankRecord, RunRecord

FASTER: Final = 1.41
"""Speed of compiled training. Source: Ansel et al. 2024 (PyTorch 2), geometric mean on an A100."""
LAUNCH_SECONDS: Final = 12e-6
"""A device that takes no longer for an operation waits for the host, which takes about as long to launch it:
6 microseconds for an addition with autograd and 14 for a layer norm, measured on one CPU with torch 2.13."""
MIN_OPERATIONS: Final = 100
"""Of a forward pass; fewer are a small model, whose time is elsewhere."""
MIN_FORWARD: Final = 0.15
FORWARDS: Final = 3
"""A step has the operations of so many forward passes, for each pass."""


def compilation(run: RunRecord) -> AdviceFinding | None:
    """A compiled model whose graph breaks, or one that would be faster compiled."""
    return graph_breaks(run) or small_operations(run)


def graph_breaks(run: RunRecord) -> AdviceFinding | None:
    """A compiled model whose graph breaks."""
    rank = run.first
    breaks: dict[str, int] = rank.facts.get("graph_breaks") or {}
    if not breaks or not rank.is_measured:
        return None
    compute, graphs = rank.share("forward", "backward"), 1 + sum(breaks.values())
    reasons = "; ".join(list(breaks)[:3])
    return AdviceFinding(
        practice="compile",
        title="The compiled graph breaks",
        evidence=f"{graphs - 1} breaks, for {len(breaks)} reasons: {reasons}.",
        gain=Gain(
            low=0.0,
            high=compute * (1 - 1 / FASTER) * (1 - 1 / graphs),
            formula="0 to c (1 - 1/s) (1 - 1/g): c the share of forward and backward in the step, s = 1.41 "
            "the speed of compiled training, g the pieces of the graph",
        ),
        change="Run once with TORCH_LOGS=graph_breaks, which names the lines. Move .item(), print and "
        "control flow that depends on values out of the model; then compile with fullgraph=True.",
    )


def small_operations(run: RunRecord) -> AdviceFinding | None:
    """A model that is not compiled, on a device that waits for the launch of each operation."""
    rank = run.first
    operations, device = rank.facts.get("operations", 0), rank.facts.get("device")
    # On a CPU no host launches anything, and what the compiler saves there is not measured.
    if device in ("", "cpu", "meta", None) or rank.facts.get("compiled") or not rank.is_measured:
        return None
    passes, forward = _passes(rank), rank.typical_share("forward")
    if operations < MIN_OPERATIONS or not passes or forward < MIN_FORWARD:
        return None
    seconds = float(rank.part("forward").mean()) / passes
    if seconds > operations * LAUNCH_SECONDS:
        return None
    compute = rank.share("forward", "backward")
    return AdviceFinding(
        practice="compile",
        title="The device waits for launches, and the model is not compiled",
        evidence=f"A forward pass has {operations} operations in {1000 * seconds:.1f} ms, "
        f"{1e6 * seconds / operations:.1f} microseconds each: about what the host needs to launch one. "
        f"Forward passes are {percent(forward)} of the time.",
        gain=Gain(
            low=0.0,
            high=compute * (1 - 1 / FASTER),
            formula="0 to c (1 - 1/s): c the share of forward and backward in the step, s = 1.41 the speed "
            "of compiled training",
        ),
        change='model = torch.compile(model), which fuses small operations; mode="reduce-overhead" also '
        "launches them together, if shapes do not vary. A larger batch makes operations larger.",
    )


def _passes(rank: RankRecord) -> float:
    """Return the forward passes of a step, by the operations of one; 0 if they are unknown."""
    rates = rank.values("model_flops_per_second")
    counted = float((rank.facts.get("attention") or {}).get("of", 0))
    if not len(rates) or not counted:
        return 0.0
    return max(1.0, float(rates.mean() * rank.seconds.mean()) / (FORWARDS * counted))
