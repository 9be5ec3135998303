"""The results of the demo, computed from messages and stored data."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.demo.outcome import (
    AlertOutcome,
    RunOutcome,
    is_judged,
    outcome_of,
    problems,
    surprises,
)
from fp8scope_dashboard.demo.plan import RunPlan, five_runs
from fp8scope_dashboard.demo.trainer import TrainerReport

PLANS = five_runs(100)
BF16, FP8, FAULTY = PLANS[0], PLANS[3], PLANS[4]
BEGAN = 1_800_000_000.0
SATURATION = AlertOutcome(
    kind="saturation_rate", severity="warning", onset_step=40, step=49, steps=9, seconds=2.0, lag=0.5
)
DIVERGENCE = AlertOutcome(
    kind="loss_divergence", severity="critical", onset_step=42, step=80, steps=40, seconds=9.0, lag=0.5
)


def report(points: int = 600) -> TrainerReport:
    """The report of a run of 100 steps of one second each."""
    times = [BEGAN + number for number in range(1, 101)]
    return TrainerReport(
        run="r",
        step=100,
        finished={"final_loss": 2.5, "seconds": 99.0, "points_sent": points, "step_times": times},
    )


def event(**changes: Any) -> dict[str, Any]:
    opened = datetime.fromtimestamp(BEGAN + 52.5, UTC).isoformat()
    return {
        "kind": "saturation_rate",
        "severity": "warning",
        "step": 50,
        "onset_step": 40,
        "opened_at": opened,
    } | changes


def stored(**changes: Any) -> dict[str, Any]:
    """A response to GET /runs/{run}."""
    score = {"name": "held-out text", "metric": "nll", "step": 100, "verdict": "equivalent", "score": 2.6}
    return {
        "comparison": {"verdict": "equivalent", "to_step": 100, "delta": 0.01, "tolerance": 0.03},
        "evaluations": [score | {"interval": [2.5, 2.7], "baseline_score": 2.6, "baseline_interval": None}],
        "events": [],
        "points_stored": 600,
        "url": "http://localhost/p/demo/runs/r/",
    } | changes


def healthy() -> list[RunOutcome]:
    """The outcomes of a demo without problems."""
    baselines = [outcome_of(plan, report(), stored(comparison=None, evaluations=[])) for plan in PLANS[:3]]
    faulty = replace(outcome_of(FAULTY, report(), stored()), alerts=(SATURATION, DIVERGENCE), verdict="worse")
    return [*baselines, outcome_of(FP8, report(), stored()), faulty]


def changed(name: str, **changes: Any) -> list[RunOutcome]:
    return [replace(outcome, **changes) if outcome.name == name else outcome for outcome in healthy()]


def test_it_works() -> None:
    assert problems(healthy()) == surprises(healthy()) == []
    outcome = healthy()[3]
    assert (outcome.verdict, outcome.delta, outcome.tolerance, outcome.final_loss) == (
        "equivalent",
        0.01,
        0.03,
        2.5,
    )
    assert outcome.scores[0].interval == (2.5, 2.7)


def test_delays_are_measured_from_the_fault_and_from_the_step() -> None:
    outcome = outcome_of(FAULTY, report(), stored(events=[event()]))
    alert = outcome.alerts[0]
    assert (alert.steps, alert.onset_step, alert.step) == (10, 40, 50)
    assert alert.seconds == pytest.approx(12.5)
    assert alert.lag == pytest.approx(2.5)


def test_a_healthy_run_has_no_delay_since_a_fault() -> None:
    alert = outcome_of(FP8, report(), stored(events=[event()])).alerts[0]
    assert alert.steps is None
    assert alert.seconds is None
    assert alert.lag == pytest.approx(2.5)


def test_a_step_without_a_time_has_no_lag() -> None:
    assert outcome_of(FP8, report(), stored(events=[event(step=101)])).alerts[0].lag is None


@pytest.mark.parametrize("verdict", ["worse", "cannot_tell", "pending", "incomplete", ""])
def test_an_unusual_verdict_of_the_healthy_run_is_a_sentence_and_no_error(verdict: str) -> None:
    outcomes = changed(FP8.name, verdict=verdict)
    assert problems(outcomes) == []
    (sentence,) = surprises(outcomes)
    assert (f"'{verdict.replace('_', ' ')}'" if verdict else "no verdict yet") in sentence
    assert "+1.00% with a tolerance of 3.00%; 'equivalent' is usual" in sentence


@pytest.mark.parametrize("verdict", ["equivalent", "better"])
def test_accepts_either_good_verdict(verdict: str) -> None:
    assert surprises(changed(FP8.name, verdict=verdict)) == []


@pytest.mark.parametrize("verdict", ["equivalent", "better", "cannot_tell", ""])
def test_the_faulty_run_is_usually_worse(verdict: str) -> None:
    outcomes = changed(FAULTY.name, verdict=verdict, delta=None)
    (sentence,) = surprises(outcomes)
    assert sentence.endswith("; 'worse' is usual here.") and problems(outcomes) == []


@pytest.mark.parametrize("name", [BF16.name, FP8.name])
def test_a_critical_alert_of_a_healthy_run_is_unusual(name: str) -> None:
    outcomes = changed(name, alerts=(DIVERGENCE,))
    assert surprises(outcomes) == [f"{name} has no fault but raised loss divergence."]
    assert surprises(changed(name, alerts=(SATURATION,))) == problems(outcomes) == []


@pytest.mark.parametrize(
    ("alerts", "missing"),
    [
        ((), ["saturation", "loss"]),
        ((SATURATION,), ["loss"]),
        ((DIVERGENCE,), ["saturation"]),
        ((replace(SATURATION, step=39), DIVERGENCE), ["saturation"]),
    ],
)
def test_the_fault_usually_raises_alerts(alerts: tuple[AlertOutcome, ...], missing: list[str]) -> None:
    outcomes = changed(FAULTY.name, alerts=alerts)
    messages = surprises(outcomes)
    assert len(messages) == len(missing) and problems(outcomes) == []
    assert all(word in text for word, text in zip(missing, messages, strict=True))


@given(index=st.integers(0, 4), sent=st.integers(0, 10**6), kept=st.integers(0, 10**6))
def test_every_point_sent_must_be_stored(index: int, sent: int, kept: int) -> None:
    messages = problems(changed(PLANS[index].name, points_sent=sent, points_stored=kept))
    assert (messages == []) == (sent == kept and sent > 0)
    assert all(PLANS[index].name in text for text in messages)


def test_a_run_is_judged_once_its_last_step_is() -> None:
    assert is_judged(FP8, stored())
    assert not is_judged(FP8, stored(comparison=None))
    assert not is_judged(FP8, stored(comparison={"verdict": "equivalent", "to_step": 99}))
    assert not is_judged(FP8, stored(comparison={"verdict": "pending", "to_step": 100}))
    assert not is_judged(FP8, stored(evaluations=[stored()["evaluations"][0] | {"verdict": "pending"}]))
    assert not is_judged(FP8, stored(evaluations=[]))
    assert not is_judged(FP8, stored(evaluations=[stored()["evaluations"][0] | {"step": 75}]))


def test_a_baseline_needs_no_judgement() -> None:
    assert is_judged(BF16, stored(comparison=None, evaluations=[]))


def test_keeps_only_the_last_scores() -> None:
    first = stored()["evaluations"][0]
    plan: RunPlan = FP8
    outcome = outcome_of(plan, report(), stored(evaluations=[first, first | {"step": 50, "score": 9.0}]))
    assert [score.score for score in outcome.scores] == [2.6]


def test_keeps_an_insufficient_verdict() -> None:
    outcome = outcome_of(
        FP8, report(), stored(comparison={"verdict": "cannot_tell", "delta": None, "to_step": 100})
    )
    assert (outcome.verdict, outcome.delta) == ("cannot_tell", None)
