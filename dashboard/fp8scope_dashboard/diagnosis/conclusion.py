"""One sentence from the findings of all steps.

The order is the order of proof. Lasting trouble that BF16 shares ends the search, because FP8 cannot be told
from it. Then come faults of the scaling, one product, and trouble that BF16 shares but recovers from. A wrong
evaluation explains scores and not losses, so it comes after them; a suspect is named only if the run is
worse. Where a step of FP8 and BF16's share the trouble, BF16 wins unless the run is worse at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.diagnosis.findings import METHOD_VERSION, Finding, Outcome
from fp8scope_dashboard.diagnosis.reference import Reference

NO_CAUSE: Final = "No cause found."
CAUSES: Final[Mapping[str, str]] = {
    "frozen_scale": "Frozen scale",
    "stale_scale": "Stale scale",
    "history_reset": "Amax history reset",
    "margin": "Margin too small",
    "margin_too_large": "Margin too large",
    "loss_scale": "Wrong loss scale",
    "underflow": "Underflowing gradients",
    "bad_layer": "One bad layer",
    "learning_rate": "Learning rate too high, not FP8",
    "data": "Data fault, not FP8",
    "training": "The training, not FP8",
    "evaluation_precision": "Evaluation in another precision",
    "mixed_versions": "Versions mixed over ranks",
    "known_version": "Version with a known fault",
}
"""Names of the causes, as the page shows them."""


@dataclass(frozen=True)
class Conclusion:
    """The diagnosis: its sentence, and the finding that it rests on; None if no cause was found."""

    sentence: str
    outcome: Outcome
    decisive: Finding | None
    findings: tuple[Finding, ...]

    @property
    def cause(self) -> str:
        return self.decisive.cause if self.decisive else ""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {
            "method_version": METHOD_VERSION,
            "sentence": self.sentence,
            "outcome": self.outcome,
            "cause": self.cause,
            "cause_name": CAUSES.get(self.cause, ""),
            "onset": self.decisive.onset if self.decisive else None,
            "suggestion": self.decisive.suggestion if self.decisive else "",
            "decided_by": self.decisive.step if self.decisive else "",
            "findings": [finding.as_dict() for finding in self.findings],
        }


def conclude(
    reference: Reference, software: Finding, scaling: Finding, product: Finding, evaluation: Finding
) -> Conclusion:
    """Choose the decisive finding; see the module's docstring."""
    findings = (reference.finding, software, scaling, product, evaluation)
    decisive = _decisive(reference, software, scaling, product, evaluation)
    if decisive is None:
        looked = any(finding.outcome == "clear" for finding in findings)
        return Conclusion(NO_CAUSE, "clear" if looked else "unknown", None, findings)
    sentence = decisive.sentence if decisive.outcome != "suspect" else f"Possible cause: {decisive.sentence}"
    return Conclusion(sentence, decisive.outcome, decisive, findings)


def _decisive(
    reference: Reference, software: Finding, scaling: Finding, product: Finding, evaluation: Finding
) -> Finding | None:
    shared = reference.finding if reference.finding.outcome == "not_fp8" else None
    if shared is not None and (reference.lasting or not reference.is_worse):
        return shared
    causes: Sequence[Finding] = (scaling, product)
    for finding in causes:
        if finding.outcome == "cause":
            return finding
    if shared is not None:
        return shared
    if evaluation.outcome == "cause" or (evaluation.outcome == "suspect" and not reference.is_worse):
        return evaluation
    if software.outcome == "suspect" and (reference.is_worse or reference.own):
        return software
    return None
