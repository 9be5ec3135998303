"""All quantities of a comparison, as they are stored and shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fp8scope_dashboard.analysis.quantities.headline import Net, net_speed
from fp8scope_dashboard.analysis.quantities.measured import MeasuredRun, reaching
from fp8scope_dashboard.analysis.quantities.ratios import (
    BaselineRatio,
    energy,
    gradient_norm,
    memory,
    throughput,
)
from fp8scope_dashboard.analysis.quantities.time_to_loss import TimeToLoss, time_to_loss
from fp8scope_dashboard.analysis.quantities.tokens_cost import LossSpread, TokensCost, tokens_cost
from fp8scope_dashboard.text import quantities as text

METHOD_VERSION: Final = 4


def of(
    ours: Sequence[MeasuredRun],
    theirs: Sequence[MeasuredRun],
    *,
    level: float = 0.95,
    spread: LossSpread | None = None,
    subject: str = "FP8",
) -> dict[str, Any]:
    """The quantities of an arm against its baseline, as JSON types; see docs/methods/costs.md.

    Args:
        ours: the judged run first, then others of its seed group.
        level: of all intervals.
        spread: of the loss between seeds, if it is known better than from these runs.
        subject: what the sentences call the first arm.
    """
    ours, theirs = reaching(ours, theirs)
    if not ours:
        return {"method_version": METHOD_VERSION, "headline": ""}
    cost = tokens_cost(ours, theirs, level=level, spread=spread)
    speed = throughput(ours, theirs, level=level)
    peak = memory(ours, theirs, level=level)
    runs = len(ours), len(theirs)
    return {
        "method_version": METHOD_VERSION,
        "headline": _headline(cost, speed, peak, subject),
        "level": level,
        "runs": list(runs),
        "tokens_cost": _cost_entry(cost, subject),
        "throughput": _ratio_entry(speed, runs, text.MISSING_SPEED),
        "memory": _ratio_entry(peak, runs, text.MISSING_MEMORY),
        "energy": _ratio_entry(energy(ours, theirs, level=level), runs, text.MISSING_POWER),
        "gradient_norm": _delta_entry(gradient_norm(ours, theirs, level=level), runs),
        "net": _net_entry(_net(cost, speed)),
        "time_to_loss": _time_entry(time_to_loss(ours, theirs, level=level, spread=spread), runs),
    }


def _net(cost: TokensCost, speed: BaselineRatio) -> Net | None:
    # Steps per second do not show how many tokens a step has, so they combine only with a cost in steps.
    if cost.more is None or cost.interval is None or speed.value is None:
        return None
    if cost.axis == "tokens" and speed.name != "tokens_per_second":
        return None
    return net_speed(speed.value, speed.interval, cost.more, cost.interval)


def _headline(cost: TokensCost, speed: BaselineRatio, peak: BaselineRatio, subject: str) -> str:
    net = _net(cost, speed)
    more = None if cost.more is None or cost.interval is None else (cost.more, cost.interval)
    reason = text.MISSING_SPEED
    if cost.refusal is not None:
        reason = text.cost_refused(cost.refusal, cost.axis, cost.limit)
    return text.headline(
        subject,
        None if speed.value is None else (speed.value, speed.interval),
        more if net is not None or speed.value is None else None,
        None if net is None else (net.value, net.interval),
        None if peak.value is None else (peak.value, peak.interval),
        axis=cost.axis,
        reason=reason,
    )


def _cost_entry(cost: TokensCost, subject: str) -> dict[str, Any]:
    if cost.more is None or cost.interval is None:
        explanation = text.cost_refused(cost.refusal or "few_points", cost.axis, cost.limit)
    else:
        sentence = text.cost(subject, cost.more, cost.interval, cost.axis)
        explanation = f"{sentence} {text.cost_basis(cost.has_seeds)}"
    return {
        "delta": cost.more,
        "interval": None if cost.interval is None else list(cost.interval),
        "n": cost.points,
        "explanation": explanation,
        "axis": cost.axis,
        "refusal": cost.refusal,
    }


def _ratio_entry(ratio: BaselineRatio, runs: tuple[int, int], missing: str) -> dict[str, Any]:
    if ratio.value is None:
        explanation = missing
    elif ratio.interval is None:
        explanation = "It did not vary, so there is no interval."
    else:
        explanation = text.ratio_basis(ratio.source, ratio.points, runs)
    return {
        "ratio": ratio.value,
        "interval": None if ratio.interval is None else list(ratio.interval),
        "n": ratio.points,
        "explanation": explanation,
        "scalar": ratio.name,
    }


def _delta_entry(ratio: BaselineRatio, runs: tuple[int, int]) -> dict[str, Any]:
    entry = _ratio_entry(ratio, runs, text.MISSING_NORM)
    value = entry.pop("ratio")
    bounds = entry.pop("interval")
    return {
        "delta": None if value is None else value - 1.0,
        "interval": None if bounds is None else [bounds[0] - 1.0, bounds[1] - 1.0],
        **entry,
    }


def _net_entry(net: Net | None) -> dict[str, Any] | None:
    if net is None:
        return None
    return {"ratio": net.value, "interval": None if net.interval is None else list(net.interval)}


def _time_entry(time: TimeToLoss, runs: tuple[int, int]) -> dict[str, Any]:
    if time.refusal is not None:
        explanation = text.TIME_REFUSALS[time.refusal]
    elif time.source == "runs":
        explanation = text.ratio_basis("runs", time.points, runs)
    else:
        explanation = text.cost_basis(time.has_seeds)
    return {
        "ratio": time.ratio,
        "interval": None if time.interval is None else list(time.interval),
        "n": time.points,
        "explanation": explanation,
        "loss": time.target,
        "seconds": time.ours,
        "baseline_seconds": time.theirs,
        "refusal": time.refusal,
    }
