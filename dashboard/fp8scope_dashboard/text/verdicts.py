"""Verdicts on losses and scores as sentences, with their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8scope_dashboard.text.numbers import about, count, length_against, level, number, percent, rounded

NO_LOSS = "The run has not logged a loss yet. A value counts as the loss if its name is loss."


def too_few_points(common: int, needed: int) -> str:
    """Return why there is no verdict on a loss yet."""
    return f"The runs have {count(common, 'point')} of loss in common; a verdict needs {needed}."


SCHEDULE_UNKNOWN = (
    "The run has gone further than its baseline, and the planned length of one of them is unknown: if their "
    "schedules differ, so do their learning rates at the same step. Set total_steps in both."
)


def schedules_differ(ratio: float, *, finals: bool) -> str:
    """A warning that the run's schedule has `ratio` times the length of its baselines'."""
    consequence = (
        "the final losses are compared, and the interval allows for the difference in length"
        if finals
        else "at the same step the learning rates differ, so there is no verdict before both have ended"
    )
    return f"The run's schedule is {length_against(ratio)} its baseline's: {consequence}."


def other_schedules(names: Sequence[str]) -> str:
    """A warning that baselines were left out because of the length of their schedules."""
    return f"Left out, because their schedules have other lengths: {_listed(names)}."


def left_out(
    *, short: Sequence[str], broken: Sequence[str], siblings: Sequence[str], left: int, of: int
) -> list[str]:
    """Warnings about the runs that a comparison does not use: `left` of `of` baselines remain."""
    warnings = []
    if short:
        warnings.append(f"Left out, because they end before the compared range: {_listed(short)}.")
    if broken:
        warnings.append(f"Left out, because their loss is NaN or infinite at the end: {_listed(broken)}.")
    if (short or broken) and left < 3:
        warnings.append(
            f"Of {count(of, 'baseline run')} {left} remain{'s' if left == 1 else ''}: too few to measure the "
            "spread between seeds, so it also comes from other runs."
        )
    if siblings:
        warnings.append(f"Runs of the same arm that ended early are left out: {_listed(siblings)}.")
    return warnings


def odd_seeds(names: Sequence[str], remaining: int) -> str:
    """A warning that baselines were left out because they are far from the others."""
    return (
        f"Left out, because the loss is far from that of the other {remaining} baseline runs: "
        f"{_listed(names)}. Did training diverge there?"
    )


def wide_spread(spread: str) -> str:
    """A warning that the own seeds spread more than those of comparable runs."""
    return (
        f"The seeds spread by {spread}, far more than comparable runs do, so only their own spread is used. "
        "Small models and short runs do so; otherwise see whether one of the seeds has diverged."
    )


def recovered(number: int, first: int, last: int) -> str:
    """A warning that the judged run's loss was not finite for a while."""
    where = (
        f"at step {first:,}" if number == 1 else f"at {number:,} points between steps {first:,} and {last:,}"
    )
    return f"The loss was NaN or infinite {where} and has recovered; these points are left out."


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """The numbers of a verdict on a loss.

    Attributes:
        relative: differences are fractions of the baseline's loss; otherwise in the unit of the loss.
        arms: the interval is over seeds, at `level`; otherwise it is the anytime-valid one of a pair.
        margin_nats: the margin in the unit of the loss, where it was chosen so.
        source: of the spread between seeds: own, project or public.
        moving: since when, on `axis`, an undecided difference moves, and by how much it has changed.
        wanders: the interval is outside the tolerance, which lasting wandering of seeds may explain.
        onset: the step at which the run has left its baseline, if that decides; `decided` is the step at
            which it was decided, and the numbers are of the latest `points` points.
    """

    verdict: str
    relative: bool
    arms: bool
    loss: float
    baseline_loss: float
    runs: int
    baselines: int
    delta: float
    interval: tuple[float, float]
    level: float
    tolerance: float
    margin: float
    source: str
    detectable: float
    steps: int | None
    seeds: int | None
    axis: str = "steps"
    moving: tuple[float, float] | None = None
    wanders: bool = False
    onset: int | None = None
    decided: int | None = None
    points: int = 0
    margin_nats: float | None = None

    def amount(self, value: float) -> str:
        """A difference as per cent, or as a number: only the script knows the unit of its loss."""
        return percent(value) if self.relative else number(value)

    @property
    def chosen_margin(self) -> str:
        """The margin as it was chosen: per cent, or nats with what these are at the baseline's loss."""
        if self.margin_nats is None:
            return f"±{self.amount(self.margin)}"
        share = f" (±{percent(self.margin)})" if self.relative else ""
        return f"±{number(self.margin_nats)} nats{share}"


def loss(facts: LossFacts) -> str:
    """The verdict on a loss, what it rests on, and what it could not have seen."""
    low, high = (facts.amount(bound) for bound in facts.interval)
    over_seeds = f"{level(facts.level)} interval over seeds"
    kind = over_seeds if facts.arms else "anytime-valid interval of this pair"
    if facts.verdict == "equivalent" and not facts.arms:
        kind = "interval over noise and seeds"
    subject = "the loss" if facts.runs == 1 else f"the mean loss of {count(facts.runs, 'run')}"
    relation = "above" if facts.delta >= 0 else "below"
    if facts.onset is not None:
        return (
            f"Since about step {facts.onset:,} {subject} is above the baseline's, which was decided at step "
            f"{facts.decided:,}. Over the last {count(facts.points, 'point')} it is {number(facts.loss)}, "
            f"{facts.amount(facts.delta)} above {_baseline(facts.baseline_loss, facts.baselines)}. The "
            f"interval by the noise before the onset, {low} to {high}, is {_conclusion(facts)}."
        )
    return (
        f"In the last compared window {subject} is {number(facts.loss)}, {facts.amount(abs(facts.delta))} "
        f"{relation} {_baseline(facts.baseline_loss, facts.baselines)}. The {kind}, {low} to {high}, is "
        f"{_conclusion(facts)}."
    )


def _conclusion(facts: LossFacts) -> str:
    allowed = _allowed(facts)
    if facts.verdict == "equivalent":
        if facts.tolerance > facts.margin:
            allowed = (
                f"±{facts.amount(facts.tolerance)}, {rounded(facts.tolerance / facts.margin, 2)} times the "
                f"margin of {facts.chosen_margin}, for which more seeds are needed"
            )
        unseen = f"A difference below {facts.amount(facts.detectable)} could have gone unseen"
        return f"inside {allowed}, so the two are equivalent. {unseen}"
    if facts.onset is not None and facts.interval[0] <= facts.tolerance:
        return (
            f"no longer wholly above {allowed}: FP8 is worse until the loss has stayed within it for a while"
        )
    if facts.verdict in ("worse", "better"):
        return (
            f"wholly {'above' if facts.verdict == 'worse' else 'below'} {allowed}, so FP8 is {facts.verdict}"
        )
    if facts.wanders:
        side = "above" if facts.delta > 0 else "below"
        return (
            f"wholly {side} {allowed}, but the difference wanders, and may have wandered there. "
            f"{_needed(facts)}"
        )
    inside = -facts.tolerance <= facts.interval[0] and facts.interval[1] <= facts.tolerance
    if inside and not facts.arms:
        return (
            f"inside {allowed}, but with the spread of seeds it is too wide to call the two equivalent. "
            f"{_needed(facts)}"
        )
    return f"neither inside nor clearly outside {allowed}. {_needed(facts)}"


def _allowed(facts: LossFacts) -> str:
    if facts.tolerance <= facts.margin:
        return f"the margin of {facts.chosen_margin}"
    whose = {"own": "the baseline's seeds", "project": "the project's seed groups"}
    source = whose.get(facts.source, "public runs")
    return f"±{facts.amount(facts.tolerance)}, which two seeds can differ by (spread of {source})"


def _needed(facts: LossFacts) -> str:
    ways = []
    if facts.steps is not None:
        ways.append(about(facts.steps, "more step"))
    if facts.seeds is not None:
        ways.append(f"{facts.seeds} seeds in each arm")
    if facts.moving is not None:
        since, change = facts.moving
        moved = f"{'risen' if change > 0 else 'fallen'} by {facts.amount(abs(change))}"
        steps = f"since {_position(since, facts.axis)}, so the number of steps that would decide is not known"
        seeds = f"; {' or '.join(ways)} would decide what it is now" if ways else ""
        return f"Cannot tell yet: the difference moves. It has {moved} {steps}{seeds}"
    if not ways:
        ways.append("only much more data")
    return f"Cannot tell yet: {' or '.join(ways)} would decide"


def _position(x: float, axis: str) -> str:
    return f"step {x:,.0f}" if axis == "steps" else f"{x:,.0f} tokens"


def diverged(since: float, axis: str, broken: int, runs: int) -> str:
    """The verdict where a loss is not finite since a step (or number of tokens)."""
    position = _position(since, axis)
    subject = "The loss" if runs == 1 else f"The loss of {broken} of {count(runs, 'run')}"
    return f"{subject} is NaN or infinite since {position}."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _baseline(loss: float, seeds: int) -> str:
    if seeds == 1:
        return f"the baseline run's {number(loss)}"
    return f"the mean of {seeds} baseline runs ({number(loss)})"
