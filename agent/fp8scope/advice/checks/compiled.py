"""Compilation: breaks in the graph."""

from typing import Final

from fp8scope.advice.finding import AdviceFinding, Gain
from fp8scope.advice.record import RunRecord

FASTER: Final = 1.41
"""Speed of compiled training. Source: Ansel et al. 2024 (PyTorch 2), geometric mean on an A100."""


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
