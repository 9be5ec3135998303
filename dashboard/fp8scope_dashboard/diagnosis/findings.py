"""The result of a step of the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

# Raise it when a rule changes, so that stored diagnoses are made again.
METHOD_VERSION: Final = 5

Step = Literal["baseline", "reference", "software", "optimizer", "scaling", "product", "evaluation"]
# cause: the step explains the trouble; not_fp8: BF16 shows it too; suspect: possible, not shown;
# effect: seen, but it began after the trouble; clear: looked and saw nothing; unknown: the data for this step
# are missing.
Outcome = Literal["cause", "not_fp8", "suspect", "effect", "clear", "unknown"]
LinkKind = Literal["run", "tensor", "compare", "evaluations", "reports", "ranks", "alerts", "source"]


@dataclass(frozen=True)
class EvidenceLink:
    """A part of a link to evidence. The page turns it into an address; `source` has one already."""

    kind: LinkKind
    label: str
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one step.

    Attributes:
        sentence: what the step says, for a person.
        cause: a key of `conclusion.CAUSES`; empty unless the outcome is a cause, not_fp8 or a suspect.
        onset: the training step at which it begins; None if unknown.
        tensors: the tensors concerned, those that began first at the beginning.
        suggestion: what to do; may be empty.
        earliest: the first step at which it may have begun, if the onset is known less exactly.
        is_proven: whether arithmetic or a measurement shows it, whatever the training does.
        observation: what was seen, without a judgement of it; empty if that is the sentence.
    """

    step: Step
    outcome: Outcome
    sentence: str
    cause: str = ""
    onset: int | None = None
    tensors: tuple[str, ...] = ()
    suggestion: str = ""
    links: tuple[EvidenceLink, ...] = ()
    earliest: int | None = None
    is_proven: bool = False
    observation: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {**asdict(self), "tensors": list(self.tensors), "links": [asdict(link) for link in self.links]}
