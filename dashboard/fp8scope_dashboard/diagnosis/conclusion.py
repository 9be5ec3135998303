"""One sentence from the findings of all steps.

The order is the order of proof. A baseline that is in trouble alone ends the search, because nothing can be
compared with it. So does lasting trouble that BF16 shares, because FP8 cannot be told from it. Then come
causes: they begin before the trouble, and need trouble (`precedence`). Faults that arithmetic proves come
first, then the one that began first. A loss that is not finite while no tensor is, and trouble that BF16
shares but recovers from, come after them. A wrong evaluation explains scores and not losses. Suspects come
last. Where a step of FP8 and BF16's share the trouble, BF16 wins unless the run is worse at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.diagnosis.findings import METHOD_VERSION, Finding, Outcome
from fp8scope_dashboard.diagnosis.precedence import RunTrouble, weighed
from fp8scope_dashboard.diagnosis.reference import ReferenceFinding

NO_CAUSE: Final = "No cause found."
CAUSES: Final[Mapping[str, str]] = {
    "frozen_scale": "Frozen scale",
    "stale_scale": "Stale scale",
    "history_reset": "Amax history reset",
    "margin": "Margin too small",
    "margin_too_large": "Margin too large",
    "loss_scale": "Wrong loss scale",
    "optimizer_state": "Broken optimizer state",
    "weight_growth": "Growing weights",
    "loss_code": "Loss computation, not FP8",
    "baseline": "Baseline in trouble, not FP8",
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


@dataclass(frozen=True, kw_only=True)
class StepFindings:
    """The finding of each step.

    Attributes:
        loss_code: a loss that is not finite while no tensor is; None without.
        trouble: of the run, which BF16 does not share.
    """

    baseline: Finding
    reference: ReferenceFinding
    software: Finding
    optimizer: Finding
    scaling: Finding
    product: Finding
    evaluation: Finding
    loss_code: Finding | None = None
    trouble: RunTrouble


def conclude(steps: StepFindings) -> Conclusion:
    """Choose the decisive finding; see the module's docstring."""
    weigh = [weighed(finding, steps.trouble) for finding in (steps.optimizer, steps.scaling, steps.product)]
    optimizer, scaling, product = weigh
    reference = steps.loss_code or steps.reference.finding
    findings = (
        steps.baseline, reference, steps.software, optimizer, scaling, product, steps.evaluation
    )  # fmt: skip
    decisive = _decisive(steps, optimizer, scaling, product)
    if decisive is None:
        looked = any(finding.outcome in ("clear", "effect") for finding in findings)
        return Conclusion(NO_CAUSE, "clear" if looked else "unknown", None, findings)
    sentence = decisive.sentence if decisive.outcome != "suspect" else f"Possible cause: {decisive.sentence}"
    return Conclusion(sentence, decisive.outcome, decisive, findings)


def _decisive(steps: StepFindings, optimizer: Finding, scaling: Finding, product: Finding) -> Finding | None:
    reference, evaluation, software = steps.reference, steps.evaluation, steps.software
    if steps.baseline.outcome == "not_fp8":
        return steps.baseline
    shared = reference.finding if reference.finding.outcome == "not_fp8" else None
    if shared is not None and (reference.lasting or not reference.is_worse):
        return shared
    causes = [finding for finding in (scaling, optimizer, product) if finding.outcome == "cause"]
    if causes:
        # Faults of scales that arithmetic proves, then the one that began first, then the order of the steps.
        return min(
            causes, key=lambda finding: (finding.step != "scaling" or not finding.is_proven, _begin(finding))
        )
    if steps.loss_code is not None:
        return steps.loss_code
    if shared is not None:
        return shared
    if evaluation.outcome == "cause" or (evaluation.outcome == "suspect" and not steps.trouble.exists):
        return evaluation
    for finding in (scaling, optimizer, product):
        if finding.outcome == "suspect":
            return finding
    if software.outcome == "suspect" and steps.trouble.exists:
        return software
    return None


def _begin(finding: Finding) -> float:
    return float("inf") if finding.onset is None else finding.onset
