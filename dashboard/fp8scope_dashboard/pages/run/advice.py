"""The card of advice on a run's page: what its agent found, and what changes have really gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.urls import reverse

from fp8scope_dashboard.analysis.advice_gains import MeasuredGain, gains_of
from fp8scope_dashboard.pages.formatting import percent
from fp8scope_dashboard.runs.advice import StoredFinding, advice_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import THIN

SHORTEST: Final = 0.0005
"""A smaller change of the time of a step is none on the page."""


@dataclass(frozen=True)
class ShownAdvice:
    """A finding, and its expected gain in words."""

    finding: StoredFinding
    expected: str


@dataclass(frozen=True, kw_only=True)
class ShownGain:
    """The measured gain of findings that a later run no longer has."""

    titles: str
    sentence: str
    judgement: str
    name: str
    address: str


def advice_context(run: Run) -> dict[str, Any]:
    """Return what the card needs."""
    advice = advice_of(run.environment)
    findings = sorted(advice.findings, key=lambda finding: -finding.high) if advice is not None else []
    return {
        "advice": advice,
        "findings": [ShownAdvice(finding, _range(finding.low, finding.high)) for finding in findings],
        "gains": [_shown(run, gain) for gain in gains_of(run)],
    }


def _shown(run: Run, gain: MeasuredGain) -> ShownGain:
    other = gain.after if gain.before.pk == run.pk else gain.before
    return ShownGain(
        titles="; ".join(finding.title for finding in gain.findings),
        sentence=sentence_of(gain),
        judgement=judgement_of(gain),
        name=other.name,
        address=reverse("run", args=[other.project.slug, other.pk]) + "?tab=efficiency",
    )


def sentence_of(gain: MeasuredGain) -> str:
    """Return the measured change of the time of a step, with its interval."""
    if gain.gain is None:
        return "What it gained cannot be told: a run has fewer than 15 steps with their time."
    if abs(gain.gain) < SHORTEST:
        text = "Steps take the same time"
    else:
        text = f"Steps take {percent(abs(gain.gain))} {'less' if gain.gain > 0 else 'more'} time"
    return f"{text}{_interval(gain.interval)}."


def judgement_of(gain: MeasuredGain) -> str:
    """Return how the gain compares with what was expected."""
    expected = f"{_range(gain.low, gain.high)} of the time was expected"
    if gain.is_expected is None:
        return f"{expected}."
    if gain.is_expected:
        return f"{expected}, which agrees."
    is_more = gain.gain is not None and gain.gain > gain.high
    return f"{expected}: it gained {'more' if is_more else 'less'}."


def _interval(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    return f" (95 % interval of what is saved: {_signed(interval)})"


def _signed(ends: Sequence[float]) -> str:
    return " to ".join(percent(end, signed=True) for end in ends)


def _range(low: float, high: float) -> str:
    """Return an expected range in whole per cent, as the terminal shows it: it is no better known."""
    return " to ".join(f"{100 * end:.{0 if end >= 0.1 or not end else 1}f}{THIN}%" for end in (low, high))
