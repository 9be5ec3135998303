"""Verdicts on losses and scores as sentences, with their numbers."""

from __future__ import annotations

from fp8scope_dashboard.text.numbers import count, number, percent


def too_few_points(common: int, needed: int) -> str:
    """Why there is no verdict on a loss yet."""
    return f"The runs have {count(common, 'point')} of loss in common; a verdict needs {needed}."


def loss_of_one_run(
    loss: float, delta: float, baseline_loss: float, seeds: int, *, tolerance: float, margin: float
) -> str:
    """The verdict on the loss of one run.

    Args:
        delta: relative difference of the loss from the baseline's.
        seeds: number of baseline runs.
        tolerance: the largest delta that is accepted; above `margin` it comes from the baseline's seeds.
    """
    held = "within" if abs(delta) <= tolerance else "over"
    source = f"3 s sqrt(1 + 1/K) of the {seeds} baseline seeds" if tolerance > margin else "the margin"
    return (
        f"In the last compared window the loss is {number(loss)}, {_relation(delta)} "
        f"{_baseline(baseline_loss, seeds)}: {held} the tolerance of {percent(tolerance)} ({source})."
    )


def loss_over_seeds(
    verdict: str,
    delta: float,
    interval: tuple[float, float],
    *,
    level: float,
    margin: float,
    runs: int,
    baseline_loss: float,
    seeds: int,
) -> str:
    """The verdict on the mean loss of several runs, `runs` against `seeds` baseline runs."""
    allowed = f"the margin of ±{percent(margin)}"
    conclusion = {
        "equivalent": f"inside {allowed}, so the two are equivalent",
        "different": f"wholly outside {allowed}, so the two differ",
    }.get(verdict, f"neither inside nor wholly outside {allowed}; add seeds to decide")
    low, high = interval
    return (
        f"In the last compared window the mean loss of {count(runs, 'run')} is {_relation(delta)} "
        f"{_baseline(baseline_loss, seeds)}; the {level:.0%} interval over seeds, "
        f"{percent(low)} to {percent(high)}, is {conclusion}."
    )


def diverged(since: float, axis: str, broken: int, runs: int) -> str:
    """The verdict where a loss is not finite since a step (or number of tokens)."""
    position = f"step {since:.0f}" if axis == "steps" else f"{since:.0f} tokens"
    subject = "The loss" if runs == 1 else f"The loss of {broken} of {count(runs, 'run')}"
    return f"{subject} is NaN or infinite in the last compared window, since {position}."


def _relation(delta: float) -> str:
    return f"{percent(abs(delta))} {'above' if delta >= 0 else 'below'}"


def _baseline(loss: float, seeds: int) -> str:
    if seeds == 1:
        return f"the baseline run's {number(loss)}"
    return f"the mean of {seeds} baseline runs ({number(loss)})"
