"""What the demo found, and whether it is what it should be: pure functions of what was told and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from fp8scope_dashboard.demo.plan import BASELINE, HEALTHY, RunPlan
from fp8scope_dashboard.demo.trainer import Told

GOOD_VERDICTS = ("equivalent", "within")
LOSS_ALERTS = ("loss_not_finite", "loss_divergence", "loss_spike", "above_baseline")
SATURATION_ALERT = "saturation_rate"


@dataclass(frozen=True)
class Alert:
    """An alert, and how late it was.

    `steps`: from the fault's first step to the step at which it was found. `seconds`: from the end of the
    fault's first step until the alert was open. `lag`: seconds from the end of the step at which it was found
    until it was open: what the way of the data takes. None where there is no fault to count from.
    """

    kind: str
    severity: str
    onset_step: int
    step: int
    steps: int | None
    seconds: float | None
    lag: float | None


@dataclass(frozen=True)
class Score:
    """An evaluation's last score against the baseline's."""

    metric: str
    verdict: str
    score: float | None
    interval: tuple[float, float] | None
    baseline: float | None
    baseline_interval: tuple[float, float] | None


@dataclass(frozen=True)
class Outcome:
    """One run: what its process said about it, and what the dashboard has of it."""

    name: str
    group: str
    fault_at: int | None
    final_loss: float | None
    seconds: float
    verdict: str
    delta: float | None
    tolerance: float | None
    scores: tuple[Score, ...]
    alerts: tuple[Alert, ...]
    points_sent: int
    points_stored: int
    page: str

    def as_dict(self) -> dict[str, Any]:
        """The same as plain numbers, strings, lists and dicts."""
        return asdict(self)


def outcome_of(plan: RunPlan, told: Told, stored: Mapping[str, Any]) -> Outcome:
    """Put together what is known of a run that has finished. `stored` is the answer to GET /runs/{run}."""
    finished = told.finished or {}
    comparison = stored["comparison"] or {}
    scores = [score for score in stored["evaluations"] if score["step"] == plan.steps]
    return Outcome(
        name=plan.name,
        group=plan.group,
        fault_at=plan.fault_at,
        final_loss=finished.get("final_loss"),
        seconds=finished.get("seconds", 0.0),
        verdict=comparison.get("verdict", ""),
        delta=comparison.get("delta"),
        tolerance=comparison.get("tolerance"),
        scores=tuple(_score(score) for score in scores),
        alerts=tuple(_alert(plan, told, event) for event in stored["events"]),
        points_sent=finished.get("points_sent", 0),
        points_stored=stored["points_stored"],
        page=stored["url"],
    )


def is_judged(plan: RunPlan, stored: Mapping[str, Any]) -> bool:
    """Whether the dashboard has compared all of a finished run with its baseline, scores included."""
    if plan.group == BASELINE:
        return True
    scored = {score["metric"] for score in stored["evaluations"] if score["step"] == plan.steps}
    comparison = stored["comparison"]
    judged = (comparison, *(score for score in stored["evaluations"] if score["step"] == plan.steps))
    if not scored or any(one is None or one["verdict"] == "pending" for one in judged):
        return False
    return bool(comparison["to_step"] == plan.steps)


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """What is not as it should be, in sentences; nothing when the demo has shown what it is there to show."""
    found = [text for one in outcomes for text in _loss_of_points(one)]
    for one in outcomes:
        if one.group == HEALTHY and one.verdict not in GOOD_VERDICTS:
            found.append(f"{one.name} is judged {one.verdict or 'not at all'}, not equivalent or within.")
        if one.fault_at is None:
            critical = [alert.kind for alert in one.alerts if alert.severity == "critical"]
            found += [f"{one.name} is healthy but raised {kind}." for kind in critical]
        else:
            found += _missing_alerts(one, one.fault_at)
    return found


def _loss_of_points(one: Outcome) -> list[str]:
    if one.points_sent == 0:
        return [f"{one.name} has sent nothing."]
    if one.points_sent != one.points_stored:
        return [f"{one.name} sent {one.points_sent} points, but {one.points_stored} are stored."]
    return []


def _missing_alerts(one: Outcome, fault_at: int) -> list[str]:
    raised = {alert.kind for alert in one.alerts if alert.step >= fault_at}
    missing = []
    if SATURATION_ALERT not in raised:
        missing.append(f"{one.name} raised no alert about saturation.")
    if raised.isdisjoint(LOSS_ALERTS):
        missing.append(f"{one.name} raised no alert about its loss.")
    return missing


def _alert(plan: RunPlan, told: Told, event: Mapping[str, Any]) -> Alert:
    step = int(event["step"])
    opened = datetime.fromisoformat(event["opened_at"]).timestamp()

    def since(number: int | None) -> float | None:
        known = number is not None and 1 <= number <= len(told.step_times)
        return opened - told.step_times[number - 1] if known and number is not None else None

    return Alert(
        kind=event["kind"],
        severity=event["severity"],
        onset_step=int(event["onset_step"]),
        step=step,
        steps=None if plan.fault_at is None else step - plan.fault_at,
        seconds=since(plan.fault_at),
        lag=since(step),
    )


def _score(score: Mapping[str, Any]) -> Score:
    return Score(
        metric=score["metric"],
        verdict=score["verdict"],
        score=score.get("score"),
        interval=_pair(score.get("interval")),
        baseline=score.get("baseline_score"),
        baseline_interval=_pair(score.get("baseline_interval")),
    )


def _pair(interval: Sequence[float] | None) -> tuple[float, float] | None:
    return None if interval is None else (interval[0], interval[1])
