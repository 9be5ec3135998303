"""The order of causes and trouble: a cause needs trouble, and begins before it. Pure functions.

What begins while the run is in trouble already is an effect of it. What was so from the first steps on, long
before a sudden trouble, does not explain why the trouble begins when it does. Without trouble nothing is a
cause: a fault that is proven by arithmetic is named as harmless so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fp8scope_dashboard.diagnosis.curves import Trouble
from fp8scope_dashboard.diagnosis.findings import Finding

# Steps by which the onset of a loss and that of a tensor may be off.
SLACK: Final = 3
# A condition is old if it began in the first fifth of the steps before the trouble, and so many steps ago.
OLD_SHARE: Final = 0.2
RECENT: Final = 50
# Their harm grows with time, so that they may be old.
ACCUMULATES: Final = ("frozen_scale", "stale_scale", "history_reset", "weight_growth", "learning_rate")


@dataclass(frozen=True)
class RunTrouble:
    """The trouble of a run that BF16 does not share.

    Attributes:
        begins: the first step of the run.
        episodes: of its loss; see curves.py.
        is_worse: whether the run ends worse than BF16, or an evaluation or the comparison says so.
    """

    begins: int = 0
    episodes: tuple[Trouble, ...] = ()
    is_worse: bool = False

    @property
    def exists(self) -> bool:
        return self.is_worse or bool(self.episodes)


def is_old(onset: int, trouble: int, begins: int) -> bool:
    """Return whether a condition that began at `onset` is neither new nor recent at a step of trouble."""
    return trouble - onset > RECENT and onset - begins <= OLD_SHARE * (trouble - begins)


def may_explain(cause: str, onset: int | None, trouble: int, begins: int) -> bool:
    """Return whether a cause (a key of `conclusion.CAUSES`) may be that of something that begins at
    `trouble`.

    It must not begin later, and must be new or recent. True if its onset is not known.
    """
    if onset is None:
        return True
    return onset <= trouble + SLACK and (cause in ACCUMULATES or not is_old(onset, trouble, begins))


def weighed(finding: Finding, trouble: RunTrouble) -> Finding:
    """The finding with the outcome that its time allows; see the module's docstring."""
    if finding.outcome != "cause" or finding.step == "evaluation":
        return finding
    if not trouble.exists:
        return _without_trouble(finding)
    begin = finding.onset if finding.earliest is None else finding.earliest
    if begin is None:
        return finding
    before = _ongoing(begin, trouble.episodes)
    if before is not None:
        note = f"It was seen after the trouble, which began at step {before.onset:,}"
        if finding.step == "product":
            return replace(finding, outcome="suspect", sentence=f"{finding.sentence} {note}.")
        return replace(finding, outcome="effect", cause="", sentence=f"{finding.sentence} {note}: an effect.")
    later = [episode for episode in trouble.episodes if episode.certain_from >= begin - SLACK]
    if not later:
        return finding if trouble.is_worse else _without_trouble(finding)
    first = later[0]
    is_late = finding.cause not in ACCUMULATES and is_old(begin, first.certain_from, trouble.begins)
    if first.kind != "rise" and is_late:
        note = f"That was so from step {begin:,} on, long before the trouble at step {first.onset:,}."
        return replace(finding, outcome="suspect", sentence=f"{finding.sentence} {note}")
    return finding


def _without_trouble(finding: Finding) -> Finding:
    if finding.cause == "bad_layer" and not finding.is_proven:
        # One layer of many always differs most. Only trouble makes it bad.
        sentence = f"{finding.observation or finding.sentence} Nothing shows that this does harm."
        return replace(finding, outcome="clear", cause="", sentence=sentence, suggestion="")
    return replace(finding, outcome="suspect", sentence=f"{finding.sentence} It has done no harm so far.")


def _ongoing(step: int, episodes: Sequence[Trouble]) -> Trouble | None:
    """The trouble that began clearly before a step and still lasted then."""
    for episode in episodes:
        if episode.certain_from < step - SLACK and (episode.until is None or episode.until >= step):
            return episode
    return None
