"""Verdicts on scores as sentences, with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8scope_dashboard.text.numbers import about, count, level, number, percent, percentage_points

MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class ScoreFacts:
    """The facts for the sentences on one score; `result` is a stored result, see `analysis.scores.result`."""

    result: Mapping[str, Any]
    in_percent: bool
    alpha: float

    def size(self, value: float) -> str:
        """A difference without its sign, in percentage points for proportions."""
        return percentage_points(abs(value)) if self.in_percent else number(abs(value))

    def score(self, value: float) -> str:
        """A score, as per cent for proportions."""
        return percent(value) if self.in_percent else number(value)

    def signed(self, value: float) -> str:
        """A difference with its sign."""
        return f"{MINUS if value < 0 else '+'}{self.size(value)}"


def explain(facts: ScoreFacts) -> str:
    """The verdict, what it rests on, and what it could not have seen."""
    result = facts.result
    if result["identical"]:
        return _identical(facts)
    if result["doubt"]:
        return (
            f"The difference to BF16 is {facts.signed(result['difference'])}{_runs(facts)}. Cannot tell "
            f"whether it is more than chance, because {result['doubt']}."
        )
    sentences = [_difference(facts), _conclusion(facts), _inside(facts), _seeds(facts)]
    if result["needs"] is not None:
        sentences.append(_required_sample(facts))
    return " ".join(sentence for sentence in sentences if sentence)


def _identical(facts: ScoreFacts) -> str:
    result = facts.result
    limit = facts.size(result["equivalent_within"])
    if result["equivalent_within"] > result["margin"]:
        return (
            f"Identical to BF16 item by item ({count(result['n'], 'item')}): equivalent within ±{limit}. So "
            "few items would not show a smaller difference."
        )
    return f"Identical to BF16 item by item ({count(result['n'], 'item')}), so the two are equivalent."


def _runs(facts: ScoreFacts) -> str:
    runs = facts.result["k_run"]
    return "" if runs <= 1 else f" (mean of {runs} runs)"


def _difference(facts: ScoreFacts) -> str:
    result = facts.result
    low, high = result["difference_interval"]
    return (
        f"The difference to BF16 is {facts.signed(result['difference'])}{_runs(facts)}, "
        f"{level(result['interval_level'])} interval {facts.signed(low)} to {facts.signed(high)}:"
    )


def _conclusion(facts: ScoreFacts) -> str:
    result = facts.result
    margin = f"the margin of ±{facts.size(result['margin'])}"
    adjusted = _adjusted(facts)
    if result["verdict"] == "equivalent":
        if result["equivalent_within"] > result["margin"]:
            return (
                f"the two are equivalent within ±{facts.size(result['equivalent_within'])}. Within {margin} "
                "they are not shown to be: that takes own seeds."
            )
        return f"inside {margin}, so the two are equivalent."
    if result["verdict"] == "worse":
        return f"worse (p = {result['p_adjusted']:.2g}{adjusted})."
    if result["verdict"] == "better":
        return f"better, beyond chance{adjusted}."
    return f"neither inside {margin} nor different beyond chance{adjusted}."


def _adjusted(facts: ScoreFacts) -> str:
    """For what the level of the interval allows besides this task and checkpoint."""
    tasks, checkpoint = facts.result["tasks"], facts.result["checkpoint"]
    of_matrix = facts.result["seed_spread"]["source"] == "none"
    parts = [] if tasks == 1 else [f"{tasks} {'cells' if of_matrix else 'tasks'}"]
    if facts.result["alpha_share"] < 1.0:
        parts.append(f"checkpoint {checkpoint} of a run with more")
    return f", adjusted for {' and '.join(parts)}" if parts else ""


def _inside(facts: ScoreFacts) -> str:
    """Practice's own criterion as a fact, and the harm that the comparison could have missed."""
    result = facts.result
    detectable = facts.size(result["smallest_detectable"])
    if result["baseline_interval"] is None:
        return f"The smallest detectable harm is {detectable}."
    if result["inside"]:
        return (
            f"The score is inside BF16's {level(1.0 - facts.alpha)} interval; a harm below {detectable} "
            "could not have been seen."
        )
    low, high = result["baseline_interval"]
    return (
        f"The score {facts.score(result['score'])} is outside BF16's {level(1.0 - facts.alpha)} interval, "
        f"{facts.score(low)} to {facts.score(high)}; the smallest detectable harm is {detectable}."
    )


def _seeds(facts: ScoreFacts) -> str:
    spread = facts.result["seed_spread"]
    if spread["source"] == "none":
        return ""
    if spread["source"] == "own":
        return f"Seed spread from {spread['seeds']} own runs: {facts.size(spread['value'])}."
    if spread["benchmark"]:
        return (
            f"There are no own seeds, so the public seed spread of {spread['benchmark']} is used: "
            f"±{facts.size(spread['value'])} (7B models, Madaan et al. 2024)."
        )
    whose = "the project's other groups" if spread["source"] == "project" else "public runs"
    return f"There are no own seeds, so the seed spread of {whose} is used: ±{facts.size(spread['value'])}."


def odd_baselines(names: Sequence[str]) -> str:
    """Return which baseline runs were left out."""
    return (
        f"Left out, because {'it is' if len(names) == 1 else 'they are'} far from the other baseline runs: "
        f"{', '.join(names)}."
    )


def _required_sample(facts: ScoreFacts) -> str:
    needs = facts.result["needs"]
    ways = []
    if needs["items"] is not None and needs["items"] > facts.result["n"]:
        ways.append(about(needs["items"], "item"))
    if needs["seeds"] is not None and needs["seeds"] > 1:
        ways.append(f"{about(needs['seeds'], 'seed')} in each arm")
    if not ways:
        return ""
    return f"To see a difference of {facts.size(facts.result['margin'])}: {' or '.join(ways)}."


def too_few_tasks() -> str:
    """Return why there is no summary."""
    return "No task has been compared with BF16 yet."


def summary(verdict: str, counts: Mapping[str, int], worse: Sequence[str], alpha: float) -> str:
    """One sentence about all tasks of a comparison, with its error rate.

    Args:
        counts: tasks by verdict.
        worse: names of the worse tasks.
    """
    tasks = sum(counts.values())
    of_tasks = f"{tasks} tasks" if tasks > 1 else "the one task"
    listed = ", ".join(worse[:3]) + (f" and {len(worse) - 3} more" if len(worse) > 3 else "")
    error = level(alpha)
    if verdict == "worse":
        return (
            f"Worse than BF16 on {counts['worse']} of {of_tasks}: {listed}. The probability that any task is "
            f"called worse without a harm is at most {error}."
        )
    if verdict == "equivalent":
        return (
            f"Equivalent to BF16 on {'all ' if tasks > 1 else ''}{of_tasks}. If one of them were off by the "
            f"limit that its verdict names, this would be said with at most {error} probability."
        )
    if verdict == "better":
        return (
            f"Not worse than BF16 on any of {of_tasks}: better on {counts['better']}, equivalent on "
            f"{counts.get('equivalent', 0)}."
        )
    if tasks == 1:
        return (
            f"Cannot tell yet for the one task: no harm has been found (error rate at most {error}), but a "
            "small one is possible."
        )
    return (
        f"Cannot tell yet for {counts['cannot_tell']} of {of_tasks}; no task is worse (error rate over all "
        f"tasks at most {error}), but smaller harms are possible."
    )
