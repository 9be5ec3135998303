"""One verdict over all tasks of a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8scope_dashboard.text import score_verdicts as text


@dataclass(frozen=True)
class ScoreSummary:
    """The verdict over tasks, the number of tasks with each verdict, and a sentence with the error rate."""

    verdict: str
    explanation: str
    counts: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)


def summarise(verdicts: Sequence[tuple[str, str]], alpha: float) -> ScoreSummary:
    """One verdict from the (name, verdict) of each task, whose p-values are adjusted by `judge` already.

    *worse* if any task is: at most alpha, because the family-wise error is. *equivalent* if every task is:
    at most alpha too, because each of the tests has to be wrong at once (Berger, 1982). *better* if every
    task is better or equivalent. Else *cannot tell*.
    """
    counts: Mapping[str, int] = Counter(verdict for _, verdict in verdicts)
    if not verdicts:
        return ScoreSummary("cannot_tell", text.too_few_tasks(), {})
    worse = [name for name, verdict in verdicts if verdict == "worse"]
    if worse:
        overall = "worse"
    elif counts["equivalent"] == len(verdicts):
        overall = "equivalent"
    elif counts["equivalent"] + counts["better"] == len(verdicts):
        overall = "better"
    else:
        overall = "cannot_tell"
    return ScoreSummary(overall, text.summary(overall, counts, worse, alpha), dict(counts))
