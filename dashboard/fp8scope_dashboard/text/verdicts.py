"""Verdicts in plain sentences, with their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8scope_dashboard.analysis.delta import LossComparison


def percent(fraction: float) -> str:
    """A fraction as per cent, with as many digits as its size calls for."""
    size = abs(100.0 * fraction)
    digits = 3 if size < 0.1 else 2 if size < 10 else 1 if size < 1000 else 0
    return f"{100.0 * fraction:.{digits}f} %"


def count(number: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def number(value: float) -> str:
    """Four significant digits, without an exponent where it can be avoided."""
    return f"{value:,.0f}" if abs(value) >= 10_000 and abs(value) < 1e15 else f"{value:.4g}"


def relation(delta: float) -> str:
    """`0.12 % above` or `0.12 % below`."""
    return f"{percent(abs(delta))} {'above' if delta >= 0 else 'below'}"


def too_few_points(found: int, needed: int) -> str:
    """Why there is no verdict yet."""
    return f"The runs have {count(found, 'point')} of loss in common; a verdict needs {needed}."


def single(result: LossComparison) -> str:
    """The verdict on one run."""
    assert result.delta is not None and result.loss is not None and result.tolerance is not None
    held = "within" if result.verdict == "within" else "over"
    source = (
        f"3 s sqrt(1 + 1/K) of the {result.k_baseline} baseline seeds"
        if result.tolerance > result.margin
        else "the margin"
    )
    return (
        f"In the last compared window the loss is {number(result.loss)}, {relation(result.delta)} "
        f"{_baseline(result)}: {held} the tolerance of {percent(result.tolerance)} ({source})."
    )


def over_seeds(result: LossComparison, level: float) -> str:
    """The verdict on several seeds of each arm."""
    assert result.delta is not None and result.interval is not None
    low, high = result.interval
    conclusion = {
        "equivalent": f"inside the margin of ±{percent(result.margin)}, so the two are equivalent",
        "different": f"wholly outside the margin of ±{percent(result.margin)}, so the two differ",
    }.get(
        result.verdict,
        f"neither inside nor wholly outside the margin of ±{percent(result.margin)}: more seeds would tell",
    )
    return (
        f"In the last compared window the mean loss of {count(result.k_run, 'run')} is "
        f"{relation(result.delta)} {_baseline(result)}; the {level:.0%} interval over seeds, "
        f"{percent(low)} to {percent(high)}, is {conclusion}."
    )


def diverged(since: float, axis: str, broken: int, runs: int) -> str:
    """The verdict where a loss is not finite."""
    place = f"step {since:.0f}" if axis == "steps" else f"{since:.0f} tokens"
    who = "The loss" if runs == 1 else f"The loss of {broken} of {count(runs, 'run')}"
    return f"{who} is NaN or infinite in the last compared window, since {place}."


def _baseline(result: LossComparison) -> str:
    assert result.baseline_loss is not None
    if result.k_baseline == 1:
        return f"the baseline run's {number(result.baseline_loss)}"
    return f"the mean of {result.k_baseline} baseline runs ({number(result.baseline_loss)})"
