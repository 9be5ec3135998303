"""The claim of a certificate: the verdict on a loss, computed from the curves that it carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from fp8scope_dashboard.analysis.coverage import conclude, in_full
from fp8scope_dashboard.analysis.loss_coverage import coverage_of_arms
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, Prior
from fp8scope_dashboard.analysis.losses.verdict import compare_losses
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.members import Member

MAX_ARM: Final = 64
MIN_MARGIN, MAX_MARGIN = 1e-6, 1.0
MAX_NATS: Final = 100.0
GOOD: Final = ("equivalent", "better")

Outcome = Literal["pass", "fail", "undecided"]
AT_ANY_TIME: Final = (
    "The interval of the pair holds at every step at once, however often somebody looked, and whenever the "
    "run was stopped."
)
OVER_SEEDS: Final = (
    "The interval over seeds holds however often somebody looked at the runs before their end. It does not "
    "hold if seeds were added, or left out, because of their result."
)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms that a verdict is judged by.

    Attributes:
        margin: relative difference that counts as none; not used if `margin_nats` is given.
        margin_nats: the same in the unit of the loss.
        alpha: probability of a wrong 'worse' or 'better' over a whole run.
        prior: spread between seeds, for arms of few seeds.
    """

    margin: float = 0.0025
    margin_nats: float | None = None
    alpha: float = 0.05
    prior: Prior = PUBLIC

    def __post_init__(self) -> None:
        """Raises CertificateError for numbers that cannot be used."""
        _check("margin", self.margin, MIN_MARGIN, MAX_MARGIN)
        if self.margin_nats is not None:
            _check("margin in nats", self.margin_nats, MIN_MARGIN, MAX_NATS)
        _check("alpha", self.alpha, 1e-6, 0.5)
        _check("spread of the prior", self.prior.spread, 1e-9, 1.0)
        _check("freedom of the prior", self.prior.freedom, 1e-3, 1e6)

    def as_dict(self) -> dict[str, Any]:
        """The terms as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> Terms:
        """Read the result of `as_dict`. Raises CertificateError."""
        try:
            prior = Prior(**document["prior"])
            if prior.source not in ("own", "project", "public"):
                raise CertificateError("the prior's source is unknown")
            return cls(**{**document, "prior": prior})
        except (TypeError, KeyError) as error:
            raise CertificateError(f"the terms are damaged: {type(error).__name__}") from None


def _check(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise CertificateError(f"the {name} is {value!r:.40}, and not between {low:g} and {high:g}")


def compared(ours: Sequence[Member], theirs: Sequence[Member], terms: Terms) -> LossComparison:
    """Compare the losses of two arms by the terms of a certificate."""
    return compare_losses(
        [member.curve for member in ours],
        [member.curve for member in theirs],
        margin=terms.margin,
        margin_nats=terms.margin_nats,
        alpha=terms.alpha,
        prior=terms.prior,
    )


def judge(ours: Sequence[Member], theirs: Sequence[Member], terms: Terms) -> dict[str, Any]:
    """Return the claim: verdict, interval, what could have been missed, and what was not judged.

    Args:
        ours: the judged arm, its first run first; `theirs`: the baseline arm. 1 to MAX_ARM runs each.
    """
    for arm, name in ((ours, "judged"), (theirs, "baseline")):
        if not 1 <= len(arm) <= MAX_ARM:
            raise CertificateError(f"the {name} arm has {len(arm)} runs, and not 1 to {MAX_ARM}")
    curves = [member.curve for member in ours], [member.curve for member in theirs]
    result = compared(ours, theirs, terms)
    standings = [member.standing for member in ours], [member.standing for member in theirs]
    judgement = conclude(result.verdict, coverage_of_arms(*standings, *curves, result))
    stored = result.as_dict()
    del stored["curve"], stored["baseline_losses"]
    return {
        **stored,
        "verdict": judgement.verdict,
        "measured": judgement.measured,
        "reason": judgement.reason,
        "covers": in_full(judgement.coverage),
        "share": judgement.coverage.share,
        "outcome": outcome_of(judgement.verdict, result.judged_margin, result.margin),
        "looks": _validity(result),
        "not_judged": _not_judged(result, ours, theirs),
    }


def outcome_of(verdict: str, judged_margin: float | None, margin: float) -> Outcome:
    """Return whether a verdict passes: 'equivalent' within the margin that was asked for, and 'better', do.

    'Equivalent' within twice the margin only is undecided: the margin was not shown.
    """
    if verdict == "worse":
        return "fail"
    is_within = verdict == "equivalent" and (judged_margin is None or judged_margin <= margin * (1 + 1e-9))
    return "pass" if is_within or verdict == "better" else "undecided"


def _validity(result: LossComparison) -> str:
    if result.delta is None:
        return ""
    return OVER_SEEDS if result.p_value is not None else AT_ANY_TIME


def _not_judged(result: LossComparison, ours: Sequence[Member], theirs: Sequence[Member]) -> list[str]:
    sentences = [
        "Only the training loss was judged: no evaluation, no downstream task, and no step after the last "
        "compared one."
    ]
    if result.delta is not None and result.paired != "data":
        batches = "their batches may differ" if result.paired == "steps" else "they logged at other points"
        sentences.append(f"That the runs saw the same data in the same order is not shown: {batches}.")
    if result.smallest_detectable is not None and result.verdict in GOOD:
        sentences.append("A smaller harm than the smallest detectable one may be there.")
    digests = [{str(member.facts.get("config_digest") or "") for member in arm} for arm in (ours, theirs)]
    if any("" in arm for arm in digests):
        sentences.append("The configurations of the runs are not all known.")
    if min(len(ours), len(theirs)) < 2:
        sentences.append(
            "An arm has one seed. How far seeds differ by themselves is taken from other runs, not from this "
            "configuration."
        )
    return sentences
