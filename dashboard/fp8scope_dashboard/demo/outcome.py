"""The results of the demo and their check. Pure functions of the runs' messages and the stored data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from fp8scope_dashboard.demo.plan import BASELINE, RunPlan
from fp8scope_dashboard.demo.trainer import TrainerReport

GOOD_VERDICTS = ("equivalent", "better")
BAD_VERDICTS = ("worse",)
LOSS_ALERTS = ("loss_not_finite", "loss_divergence", "loss_spike", "above_baseline")
SATURATION_ALERT = "saturation_rate"


@dataclass(frozen=True, kw_only=True)
class AlertOutcome:
    """An alert and its delays.

    `steps`: from the fault's first step to the step of detection. `seconds`: from the end of the fault's
    first step until the alert opened. `lag`: seconds from the end of the step of detection until then.
    `steps` and `seconds` are None for a run without a fault.
    """

    kind: str
    severity: str
    onset_step: int
    step: int
    steps: int | None
    seconds: float | None
    lag: float | None


@dataclass(frozen=True, kw_only=True)
class ScoreOutcome:
    """An evaluation's last score against the baseline's."""

    metric: str
    verdict: str
    score: float | None
    interval: tuple[float, float] | None
    baseline: float | None
    baseline_interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The results of one run, from its process and from the dashboard."""

    name: str
    group: str
    fault_at: int | None
    final_loss: float | None
    seconds: float
    verdict: str
    delta: float | None
    tolerance: float | None
    scores: tuple[ScoreOutcome, ...]
    alerts: tuple[AlertOutcome, ...]
    points_sent: int
    points_stored: int
    page: str

    def as_dict(self) -> dict[str, Any]:
        """The results as plain numbers, strings, lists and dicts."""
        return asdict(self)


def outcome_of(plan: RunPlan, report: TrainerReport, stored: Mapping[str, Any]) -> RunOutcome:
    """Combine the results of a finished run. `stored` is the response to GET /runs/{run}."""
    finished = report.finished or {}
    comparison = stored["comparison"] or {}
    scores = [score for score in stored["evaluations"] if score["step"] == plan.steps]
    return RunOutcome(
        name=plan.name,
        group=plan.group,
        fault_at=plan.fault_at,
        final_loss=finished.get("final_loss"),
        seconds=finished.get("seconds", 0.0),
        verdict=comparison.get("verdict", ""),
        delta=comparison.get("delta"),
        tolerance=comparison.get("tolerance"),
        scores=tuple(_score(score) for score in scores),
        alerts=tuple(_alert(plan, report, alert) for alert in stored["events"]),
        points_sent=finished.get("points_sent", 0),
        points_stored=stored["points_stored"],
        page=stored["url"],
    )


def is_judged(plan: RunPlan, stored: Mapping[str, Any]) -> bool:
    """Return whether the dashboard has compared all of a finished run with its baseline, scores included."""
    if plan.group == BASELINE:
        return True
    scored = {score["metric"] for score in stored["evaluations"] if score["step"] == plan.steps}
    comparison = stored["comparison"]
    judged = (comparison, *(score for score in stored["evaluations"] if score["step"] == plan.steps))
    if not scored or any(verdict is None or verdict["verdict"] == "pending" for verdict in judged):
        return False
    return bool(comparison["to_step"] == plan.steps)


def problems(outcomes: Sequence[RunOutcome]) -> list[str]:
    """The errors as sentences: data that was not sent, or not stored. Empty if there is none."""
    return [text for outcome in outcomes for text in _lost_points(outcome)]


def surprises(outcomes: Sequence[RunOutcome]) -> list[str]:
    """The verdicts and alerts that are unusual for this demo, as sentences.

    They are no errors: processors and versions of torch round differently, as if the seeds were others.
    """
    texts = []
    for outcome in outcomes:
        if outcome.group != BASELINE:
            texts += _unusual_verdict(outcome)
        if outcome.fault_at is None:
            critical = [alert.kind for alert in outcome.alerts if alert.severity == "critical"]
            texts += [f"{outcome.name} has no fault but raised {_words(kind)}." for kind in critical]
        else:
            texts += _missing_alerts(outcome, outcome.fault_at)
    return texts


def _unusual_verdict(outcome: RunOutcome) -> list[str]:
    usual = GOOD_VERDICTS if outcome.fault_at is None else BAD_VERDICTS
    if outcome.verdict in usual:
        return []
    verdict = f"the verdict '{_words(outcome.verdict)}'" if outcome.verdict else "no verdict yet"
    measured = ""
    if outcome.delta is not None and outcome.tolerance is not None:
        measured = f" at {outcome.delta:+.2%} with a tolerance of {outcome.tolerance:.2%}"
    return [f"{outcome.name} has {verdict}{measured}; '{usual[0]}' is usual here."]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _lost_points(outcome: RunOutcome) -> list[str]:
    if outcome.points_sent == 0:
        return [f"{outcome.name} sent no points."]
    if outcome.points_sent != outcome.points_stored:
        return [f"{outcome.name} sent {outcome.points_sent} points, but {outcome.points_stored} are stored."]
    return []


def _missing_alerts(outcome: RunOutcome, fault_at: int) -> list[str]:
    raised = {alert.kind for alert in outcome.alerts if alert.step >= fault_at}
    missing = []
    if SATURATION_ALERT not in raised:
        missing.append(f"{outcome.name} raised no alert about saturation.")
    if raised.isdisjoint(LOSS_ALERTS):
        missing.append(f"{outcome.name} raised no alert about its loss.")
    return missing


def _alert(plan: RunPlan, report: TrainerReport, alert: Mapping[str, Any]) -> AlertOutcome:
    step = int(alert["step"])
    opened = datetime.fromisoformat(alert["opened_at"]).timestamp()

    def since(number: int | None) -> float | None:
        has_time = number is not None and 1 <= number <= len(report.step_times)
        return opened - report.step_times[number - 1] if has_time and number is not None else None

    return AlertOutcome(
        kind=alert["kind"],
        severity=alert["severity"],
        onset_step=int(alert["onset_step"]),
        step=step,
        steps=None if plan.fault_at is None else step - plan.fault_at,
        seconds=since(plan.fault_at),
        lag=since(step),
    )


def _score(score: Mapping[str, Any]) -> ScoreOutcome:
    return ScoreOutcome(
        metric=score["metric"],
        verdict=score["verdict"],
        score=score.get("score"),
        interval=_pair(score.get("interval")),
        baseline=score.get("baseline_score"),
        baseline_interval=_pair(score.get("baseline_interval")),
    )


def _pair(interval: Sequence[float] | None) -> tuple[float, float] | None:
    return None if interval is None else (interval[0], interval[1])
