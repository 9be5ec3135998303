"""Step (e): the evaluation. The precision that it ran in, and whether only the evaluation is worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding

# With fewer checkpoints a trend cannot be told from noise.
MIN_CHECKPOINTS: Final = 3
LINKS: Final = (EvidenceLink("evaluations", "Evaluations"),)


@dataclass(frozen=True)
class Scored:
    """One evaluation of a run, without its items.

    Attributes:
        precision: what the evaluation computed in; empty if it is not recorded.
        verdict: of the comparison with BF16; empty if there is none.
    """

    name: str
    metric: str
    step: int
    precision: str = ""
    verdict: str = ""

    @property
    def task(self) -> tuple[str, str]:
        return self.name, self.metric


def examine(
    ours: Sequence[Scored], theirs: Sequence[Scored], precision: str, *, training_is_worse: bool
) -> Finding:
    """The finding of this step.

    Args:
        ours: the run's evaluations; theirs: those of its BF16 runs.
        precision: what the run trains in.
        training_is_worse: whether the training loss is worse than BF16's as well.
    """
    if not ours:
        return Finding(step="evaluation", outcome="unknown", sentence="The run has no evaluations.")
    finding = _in_another_precision(ours, theirs, precision) or _of_a_baseline_in_another_precision(theirs)
    if finding is None and not training_is_worse:
        finding = _worse_alone(ours)
    return finding or _agreement(ours)


def _in_another_precision(ours: Sequence[Scored], theirs: Sequence[Scored], precision: str) -> Finding | None:
    wrong = next((score for score in reversed(ours) if _mismatch(score.precision, precision)), None)
    if wrong is None:
        return None
    reference = {score.precision.upper() for score in theirs if score.task == wrong.task and score.precision}
    versus = f", and the BF16 runs in {' and '.join(sorted(reference))}" if reference else ""
    sentence = (
        f"The evaluation is in the wrong precision: {wrong.name} {wrong.metric} at step {wrong.step:,} was "
        f"computed in {wrong.precision.upper()}, the run trains in {precision.upper()}{versus}."
    )
    return Finding(
        step="evaluation", outcome="cause", sentence=sentence, cause="evaluation_precision", onset=wrong.step,
        suggestion="Evaluate both arms in one precision, that of the training.", links=LINKS,
    )  # fmt: skip


def _of_a_baseline_in_another_precision(theirs: Sequence[Scored]) -> Finding | None:
    crossed = next((score for score in theirs if _mismatch(score.precision, "bf16")), None)
    if crossed is None:
        return None
    sentence = (
        f"The evaluation is in the wrong precision: the BF16 baseline's {crossed.name} {crossed.metric} at "
        f"step {crossed.step:,} was computed in {crossed.precision.upper()}."
    )
    return Finding(
        step="evaluation",
        outcome="cause",
        sentence=sentence,
        cause="evaluation_precision",
        onset=crossed.step,
        suggestion="Evaluate the baseline in BF16.",
        links=LINKS,
    )


def _worse_alone(ours: Sequence[Scored]) -> Finding | None:
    """Scores that are worse although the training loss is not."""
    # With a known precision, worse scores are no sign of a wrong one.
    worse = [score for score in ours if score.verdict == "worse" and not score.precision]
    if not worse:
        return None
    last = worse[-1]
    sentence = (
        f"Only the evaluation is worse: {last.name} {last.metric} at step {last.step:,} is worse than "
        "BF16's, though the training loss is not; check the precision that it was computed in."
    )
    return Finding(
        step="evaluation",
        outcome="suspect",
        sentence=sentence,
        cause="evaluation_precision",
        onset=last.step,
        suggestion="Log the precision of evaluations, and repeat this one.",
        links=LINKS,
    )


def _agreement(ours: Sequence[Scored]) -> Finding:
    checkpoints = len({score.step for score in ours})
    note = ""
    if checkpoints < MIN_CHECKPOINTS:
        note = f" Only {checkpoints} checkpoint{'s' if checkpoints > 1 else ''}: too few for a trend."
    is_known = any(score.precision for score in ours)
    precision = "in the training's precision" if is_known else "precision not recorded"
    sentence = f"The evaluations agree with the training ({precision}).{note}"
    return Finding(step="evaluation", outcome="clear", sentence=sentence, links=LINKS)


def _mismatch(evaluated: str, trained: str) -> bool:
    """Return whether an evaluation's recorded precision is not the training's."""
    return bool(evaluated) and trained not in ("", "unknown") and _family(evaluated) != _family(trained)


def _family(precision: str) -> str:
    """`FP8-E4M3` and `fp8` are one precision; so are `bf16` and `bfloat16`."""
    name = precision.lower().replace("_", "").replace("-", "")
    for family, words in _FAMILIES.items():
        if any(word in name for word in words):
            return family
    return name


_FAMILIES: Final = {
    "fp8": ("fp8", "float8", "e4m3", "e5m2"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
    "fp32": ("fp32", "float32"),
}
