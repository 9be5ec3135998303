"""Badges of verdicts and states: a label, a tone and an icon, so that nothing depends on colour alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from django.conf import settings
from django.templatetags.static import static
from django.utils.html import format_html
from django.utils.safestring import SafeString

from fp8scope_dashboard.analysis.coverage import INCOMPLETE, PENDING, Judgement, Standing, is_dead, percent_of

Tone = Literal["good", "warning", "danger", "neutral", "live"]


@dataclass(frozen=True)
class Badge:
    """A label with a tone and an icon."""

    label: str
    tone: Tone
    icon: str


def icon_html(name: str) -> SafeString:
    """An icon of static/pages/img/icons.svg. It is decorative: text beside it has the meaning."""
    return _icon(_icons(settings.STATIC_URL), name)


@lru_cache(maxsize=8)
def _icons(base: str) -> str:
    """The address of the icons below an address of static files."""
    return static("pages/img/icons.svg")


@lru_cache(maxsize=256)
def _icon(address: str, name: str) -> SafeString:
    return format_html('<svg class="icon" aria-hidden="true"><use href="{}#{}"></use></svg>', address, name)


def badge_html(badge: Badge) -> SafeString:
    """A badge as HTML."""
    return format_html(
        '<span class="badge badge--{}">{}{}</span>', badge.tone, icon_html(badge.icon), badge.label
    )


def on_off_badge(title: str, is_on: bool) -> Badge:
    """The badge of something that can be switched off, such as a rule."""
    return Badge(title, "good", "check") if is_on else Badge(f"{title}, off", "neutral", "bell-off")


VERDICTS: Final[Mapping[str, Badge]] = {
    "equivalent": Badge("Equivalent to BF16", "good", "check"),
    "worse": Badge("Worse than BF16", "danger", "cross"),
    "better": Badge("Better than BF16", "good", "check"),
    "cannot_tell": Badge("Cannot tell yet", "neutral", "question"),
}
# Good verdicts on a part of a run, with another colour and icon than those on a whole run.
SO_FAR: Final[Mapping[str, Badge]] = {
    "equivalent": Badge("Equivalent so far", "neutral", "clock"),
    "better": Badge("Better so far", "neutral", "clock"),
}
NOT_ALL_JUDGED = Badge("Incomplete", "warning", "question")
TOO_LITTLE = Badge("Not enough data", "neutral", "question")
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
FINISHED_EARLY = Badge("Finished early", "warning", "alert")
SEVERITIES: Final[Mapping[str, Badge]] = {
    "critical": Badge("Critical", "danger", "cross"),
    "warning": Badge("Warning", "warning", "alert"),
}
ALERT_STATES: Final[Mapping[str, Badge]] = {
    "open": Badge("Open", "danger", "alert"),
    "acknowledged": Badge("Acknowledged", "neutral", "eye"),
    "muted": Badge("Muted", "neutral", "bell-off"),
    "resolved": Badge("Resolved", "good", "check"),
}
COMMAND_STATES: Final[Mapping[str, Badge]] = {
    "waiting": Badge("Waiting", "neutral", "clock"),
    "delivered": Badge("Delivered", "live", "pulse"),
    "accepted": Badge("In progress", "live", "pulse"),
    "done": Badge("Done", "good", "check"),
    "refused": Badge("Refused", "warning", "minus"),
    "failed": Badge("Failed", "danger", "cross"),
    "expired": Badge("Expired", "neutral", "clock"),
}
WINDOW_VERDICTS: Final[Mapping[str, Badge]] = {
    "within": Badge("Within", "good", "check"),
    "over": Badge("Over", "danger", "cross"),
}
# For a run that failed, went silent or stopped early.
DEAD_WINDOW = Badge("Within", "neutral", "minus")


def state_badge(standing: Standing) -> Badge:
    """The badge of a run's standing."""
    return FINISHED_EARLY if standing == "finished_early" else STATES[standing]


def loss_badge(
    judgement: Judgement | None, *, has_baseline: bool, is_baseline: bool, within: str = ""
) -> Badge:
    """The badge of a run's verdict, or of the reason why there is none.

    Args:
        within: an equivalence's limit, if it is not the project's margin.
    """
    if judgement is not None:
        if judgement.verdict == PENDING:
            return SO_FAR.get(judgement.measured, UNKNOWN)
        if judgement.verdict == INCOMPLETE:
            return NOT_ALL_JUDGED
        if judgement.verdict == "cannot_tell" and is_dead(judgement.coverage.standing):
            return TOO_LITTLE
        if judgement.verdict == "equivalent" and within:
            return Badge(f"Equivalent within {within}", "good", "check")
        return VERDICTS.get(judgement.verdict, UNKNOWN)
    if is_baseline:
        return IS_BASELINE
    return NOT_COMPARED if has_baseline else NO_BASELINE


def score_badge(judgement: Judgement, within: str = "") -> Badge:
    """The badge of an evaluation's verdict. `within`: an equivalence's limit, if it is not the margin."""
    if judgement.verdict in (PENDING, INCOMPLETE):
        return _so_far(judgement)
    if judgement.verdict == "equivalent" and within:
        return Badge(f"Equivalent within {within}", "good", "check")
    return VERDICTS.get(judgement.verdict, UNKNOWN)


def _so_far(judgement: Judgement) -> Badge:
    """The badge of a good score at a checkpoint before the end of the run."""
    if is_dead(judgement.coverage.standing):
        return NOT_ALL_JUDGED
    share = percent_of(judgement.coverage)
    word = judgement.measured.capitalize()
    return Badge(f"{word} at {share}" if share else f"{word} so far", "neutral", "clock")
