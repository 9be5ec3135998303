"""How verdicts and states look: a word, a tone and an icon, so that colour never speaks alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Tone = Literal["good", "warning", "danger", "neutral", "live"]


@dataclass(frozen=True)
class Badge:
    """What a badge shows."""

    label: str
    tone: Tone
    icon: str


LOSS_VERDICTS: Final[Mapping[str, Badge]] = {
    "equivalent": Badge("Equivalent to BF16", "good", "check"),
    "within": Badge("Within tolerance", "good", "check"),
    "different": Badge("Different from BF16", "danger", "cross"),
    "over": Badge("Over tolerance", "danger", "cross"),
    "inconclusive": Badge("Inconclusive", "warning", "question"),
    "insufficient": Badge("Too early to tell", "neutral", "clock"),
}
NO_BASELINE = Badge("No baseline", "neutral", "minus")
IS_BASELINE = Badge("Baseline", "neutral", "flag")
NOT_COMPARED = Badge("Not compared yet", "neutral", "clock")
UNKNOWN = Badge("Unknown", "neutral", "question")

STATES: Final[Mapping[str, Badge]] = {
    "running": Badge("Running", "live", "pulse"),
    "finished": Badge("Finished", "neutral", "check"),
    "failed": Badge("Failed", "danger", "cross"),
    "silent": Badge("Silent", "warning", "question"),
}
SEVERITIES: Final[Mapping[str, Badge]] = {
    "critical": Badge("Critical", "danger", "cross"),
    "warning": Badge("Warning", "warning", "alert"),
}
EVENT_STATES: Final[Mapping[str, Badge]] = {
    "open": Badge("Open", "danger", "alert"),
    "acknowledged": Badge("Acknowledged", "neutral", "eye"),
    "resolved": Badge("Resolved", "good", "check"),
}
COMMAND_STATES: Final[Mapping[str, Badge]] = {
    "waiting": Badge("Waiting", "neutral", "clock"),
    "delivered": Badge("Delivered", "live", "pulse"),
    "accepted": Badge("Under way", "live", "pulse"),
    "done": Badge("Done", "good", "check"),
    "refused": Badge("Refused", "warning", "minus"),
    "failed": Badge("Failed", "danger", "cross"),
    "expired": Badge("Expired", "neutral", "clock"),
}
WINDOW_VERDICTS: Final[Mapping[str, Badge]] = {
    "within": Badge("Within", "good", "check"),
    "over": Badge("Over", "danger", "cross"),
}


def loss_badge(verdict: str | None, *, has_baseline: bool, is_baseline: bool) -> Badge:
    """The badge of a run's verdict; says what is missing where there is none."""
    if verdict is not None:
        return LOSS_VERDICTS.get(verdict, UNKNOWN)
    if is_baseline:
        return IS_BASELINE
    return NOT_COMPARED if has_baseline else NO_BASELINE


def score_badge(verdict: str, *, higher_is_better: bool) -> Badge:
    """The badge of an evaluation's verdict: being outside on the better side is not a fault."""
    if verdict == "inside":
        return Badge("Inside BF16's interval", "good", "check")
    if verdict in ("above", "below"):
        better = (verdict == "above") == higher_is_better
        return Badge(
            f"{verdict.capitalize()} BF16's interval",
            "warning" if better else "danger",
            "up" if verdict == "above" else "down",
        )
    return Badge("Too little to tell", "neutral", "clock")
