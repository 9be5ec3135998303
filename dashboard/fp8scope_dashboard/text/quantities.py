"""Speed, memory, gradient norm and cost in tokens as sentences, with their intervals."""

from __future__ import annotations

from fp8scope_dashboard.text.numbers import MINUS, THIN, count

Interval = tuple[float, float]

COST_REFUSALS = {
    "few_points": "The runs have too few losses in common for a slope.",
    "not_finite": "A loss near the end is NaN or infinite.",
    "level": "The baseline's loss is level: its slope cannot be told from zero, so a difference of the loss "
    "has no equivalent in {axis}.",
    "wide": "The difference of the losses is too uncertain for a number of {axis}.",
    "rising": "The baseline's loss is rising, so a difference of the loss has no equivalent in {axis}.",
}
TIME_REFUSALS = {
    "no_times": "Both sides must log step_seconds at 15 steps or more.",
    "begins_late": "A run begins late: the time that it trained before is not known.",
    "few_points": "A run has too few losses with a time.",
    "not_finite": "A loss is NaN or infinite where it is compared.",
    "level": "A loss is level: when it reaches a value cannot be told.",
    "rising": "A loss is rising, so no lower loss is reached.",
    "never": "A run does not reach the loss of the others.",
}
# Two amounts of memory are equal if they differ by less.
SAME_MEMORY = 0.005
# Two speeds are equal if the interval of their ratio is within this factor.
EQUALLY_FAST = 1.05
MISSING_SPEED = "Both sides must log at least 15 steps with tokens_per_second or step_seconds."
MISSING_MEMORY = "Both sides must log memory_peak, which needs a CUDA device."
MISSING_POWER = (
    "Both sides must log gpu_power_watts, as NVIDIA GPUs do with pip install 'fp8scope[gpu]', and "
    "tokens_per_second."
)
MISSING_NORM = "Both sides must log grad_norm at 15 steps or more, in a common range."


# An interval whose bounds differ by a larger factor says nothing about a ratio.
WIDEST = 10.0


def times(ratio: float, interval: Interval | None = None) -> str:
    """`1.31 ×`, `1.31 × (1.29 to 1.33)`, or that the ratio is too uncertain for a number."""
    if _is_unknown(interval):
        return f"not known within a factor of {WIDEST:.0f}"
    bounds = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return f"{ratio:.2f}{THIN}×{bounds}"


def _is_unknown(interval: Interval | None) -> bool:
    return interval is not None and interval[1] > WIDEST * interval[0]


def share(more: float, interval: Interval) -> str:
    """`1.8 % (1.2 to 2.5) more`, `0.4 % (−0.2 to 0.9) fewer`: the bounds have the sense of the word."""
    word, sign = ("more", 1.0) if more >= 0.0 else ("fewer", -1.0)
    low, high = sorted((sign * 100.0 * interval[0], sign * 100.0 * interval[1]))
    digits = 1 if high - low >= 0.1 else 2
    bounds = f"{low:.{digits}f} to {high:.{digits}f}".replace("-", MINUS)
    return f"{sign * 100.0 * more:.{digits}f}{THIN}% ({bounds}) {word}"


def faster(subject: str, ratio: float, interval: Interval | None) -> str:
    """`FP8 is 1.31 × (1.29 to 1.33) faster`, or at what share of the speed of BF16 it runs."""
    if _is_unknown(interval):
        return f"{subject} runs at a speed, beside that of BF16, which is {times(ratio, interval)}"
    if interval is not None and interval[0] <= 1.0 <= interval[1]:
        if interval[0] >= 1.0 / EQUALLY_FAST and interval[1] <= EQUALLY_FAST:
            return f"{subject} is as fast as BF16: {times(ratio, interval)}"
        return f"{subject} may be faster or slower than BF16: {times(ratio, interval)}"
    if ratio >= 1.0:
        return f"{subject} is {times(ratio, interval)} faster"
    return f"{subject} runs at {times(ratio, interval)} the speed of BF16"


def less_memory(ratio: float, interval: Interval | None) -> str:
    """`takes 12 % (11 to 13) less memory`, more, as much, or may take more or less."""
    if interval is not None and interval[0] < 1.0 < interval[1]:
        if max(1.0 - interval[0], interval[1] - 1.0) > SAME_MEMORY:
            return f"may take more or less memory: {times(ratio, interval)}"
        return "takes as much memory"
    if abs(ratio - 1.0) < SAME_MEMORY:
        return "takes as much memory"
    word, sign = ("more", 1.0) if ratio > 1.0 else ("less", -1.0)
    size = 100.0 * abs(ratio - 1.0)
    digits = 0 if size >= 9.95 else 1
    bounds = ""
    if interval is not None:
        low, high = sorted(100.0 * sign * (bound - 1.0) for bound in interval)
        bounds = f" ({low:.{digits}f} to {high:.{digits}f})"
    return f"takes {size:.{digits}f}{THIN}%{bounds} {word} memory"


def cost(subject: str, more: float, interval: Interval, axis: str) -> str:
    """`FP8 needs 1.8 % (1.2 to 2.5) more tokens for the same loss.`"""
    return f"{subject} needs {share(more, interval)} {axis} for the same loss."


def cost_refused(refusal: str, axis: str, limit: float | None) -> str:
    """Return why the cost in tokens is unknown."""
    if refusal == "beyond" and limit is not None:
        word = "more" if limit > 0 else "fewer"
        return (
            f"The losses differ by more than the baseline gained in the last third of the range, so the cost "
            f"is more than {abs(100.0 * limit):.0f}{THIN}% {word} {axis}. The slope of the baseline's loss "
            "tells no more."
        )
    return COST_REFUSALS[refusal].format(axis=axis)


def cost_basis(has_seeds: bool) -> str:
    """Return what the interval of the cost includes."""
    if has_seeds:
        return "The interval includes the spread between seeds."
    return "The interval holds for these runs; other seeds may differ more."


def ratio_basis(source: str, points: int, runs: tuple[int, int]) -> str:
    """Return what the interval of a ratio comes from."""
    if source == "runs":
        return f"The interval is that between runs ({runs[0]} against {runs[1]})."
    return f"The interval is from the noise within the runs ({count(points, 'point')} each or more)."


def headline(
    subject: str,
    speed: tuple[float, Interval | None] | None,
    more: tuple[float, Interval] | None,
    net: tuple[float, Interval | None] | None,
    memory: tuple[float, Interval | None] | None = None,
    *,
    axis: str,
    reason: str,
) -> str:
    """Speed, memory and cost in one or two sentences; what is missing is named, with the reason.

    Empty without anything.
    """
    takes = "" if memory is None else less_memory(*memory)
    if speed is None:
        return _without_speed(subject, more, takes, axis, reason)
    first = faster(subject, *speed)
    if takes:
        first += f"{',' if ':' in first else ''} and {takes}"
    if more is None or net is None:
        return f"{first}; how many more {axis} it needs is not known. {reason}"
    needs = f"{first}{'. It' if takes else ' and'} needs {share(*more)} {axis}"
    return f"{needs}." if _is_unknown(net[1]) else f"{needs}: {times(*net)} to the same loss."


def _without_speed(
    subject: str, more: tuple[float, Interval] | None, takes: str, axis: str, reason: str
) -> str:
    if more is None:
        return f"{subject} {takes}; its speed is not known. {MISSING_SPEED}" if takes else ""
    joined = f" and {takes}" if takes else ""
    return (
        f"{subject} needs {share(*more)} {axis} for the same loss{joined}; its speed is not known. {reason}"
    )
