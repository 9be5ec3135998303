"""The share of the planned run that a verdict covers, and when a good verdict is final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.analysis.coverage import (
    GOOD,
    BaselineArm,
    Coverage,
    Standing,
    cadence,
    conclude,
    in_full,
    in_short,
    missing_steps,
    standing_of,
)

FINISHED = BaselineArm(("finished", "finished", "finished"), 600)
FULL = Coverage(
    standing="finished", judged=600.0, planned=600.0, plan="total_steps", reached=600, baseline=FINISHED
)
STANDINGS: tuple[Standing, ...] = ("running", "finished", "finished_early", "failed", "silent")
VERDICTS = ("equivalent", "better", "worse", "cannot_tell")


def test_it_works() -> None:
    judgement = conclude("equivalent", FULL)
    assert judgement.final and judgement.verdict == "equivalent" and judgement.reason == ""
    assert in_short(FULL) == "100 % of the planned run"


def test_a_run_that_failed_at_step_72_of_600_is_not_equivalent() -> None:
    coverage = replace(FULL, standing="failed", judged=72.0, reached=72)
    judgement = conclude("equivalent", coverage)
    assert judgement.verdict == "incomplete" and not judgement.final and judgement.measured == "equivalent"
    assert judgement.reason == "The run failed at step 72 of 600 planned."
    assert coverage.share == 0.12 and in_short(coverage) == "12 % of the planned run"
    assert in_full(coverage) == "Judged up to step 72 of 600 planned: 12 % of the planned run."


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        ("failed", "failed at step 600"),
        ("silent", "went silent at step 600"),
        ("finished_early", "finished early, at step 600"),
    ],
)
def test_a_dead_run_never_gets_a_good_verdict(standing: Standing, words: str) -> None:
    judgement = conclude("equivalent", replace(FULL, standing=standing))
    assert judgement.verdict == "incomplete" and words in judgement.reason


def test_the_verdict_on_a_running_run_is_pending() -> None:
    judgement = conclude("equivalent", replace(FULL, standing="running", judged=72.0, reached=72))
    assert judgement.verdict == "pending" and "not finished yet" in judgement.reason


def test_an_incomplete_run_keeps_a_verdict_that_is_not_good() -> None:
    for standing in STANDINGS:
        for measured in ("worse", "cannot_tell"):
            assert conclude(measured, replace(FULL, standing=standing, judged=72.0)).verdict == measured


@pytest.mark.parametrize(
    ("standings", "verdict", "words"),
    [
        (("failed", "failed", "silent"), "incomplete", "2 failed, 1 went silent, the furthest at step 600"),
        (("finished_early",), "incomplete", "1 finished early"),
        (("failed", "running"), "pending", "The baseline has not finished yet."),
        (("finished", "failed"), "equivalent", ""),
        ((), "incomplete", "No part of the run has been compared with a baseline yet."),
    ],
)
def test_the_baseline_must_have_finished_as_well(
    standings: tuple[Standing, ...], verdict: str, words: str
) -> None:
    judgement = conclude("equivalent", replace(FULL, baseline=BaselineArm(standings, 600)))
    assert judgement.verdict == verdict and words in judgement.reason


def test_a_finished_run_is_judged_to_its_end() -> None:
    short = conclude("equivalent", replace(FULL, judged=540.0))
    assert short.verdict == "incomplete" and "up to step 540 only" in short.reason
    assert conclude("equivalent", replace(FULL, judged=540.0, waits=True)).verdict == "pending"
    # Steps that begin at 0, steps logged every 50 steps, and arms that end at almost the same token.
    for coverage in (
        replace(FULL, judged=599.0),
        replace(FULL, judged=550.0, gap=50.0),
        replace(FULL, judged=595.0),
    ):
        assert conclude("equivalent", coverage).final and coverage.share == 1.0


def test_a_verdict_without_a_plan_is_not_final() -> None:
    coverage = replace(FULL, planned=600.0, plan="longest_run", judged=300.0)
    assert "plan is unknown" in in_full(coverage) and "600 steps: 50 %" in in_full(coverage)
    assert in_short(coverage) == "50 % of the longest run"
    unknown = replace(coverage, planned=None, plan="unknown")
    assert unknown.share is None and not conclude("equivalent", unknown).final
    assert "unknown" in in_full(unknown) and in_short(unknown) == "plan unknown"


@pytest.mark.parametrize(
    ("judged", "text"), [(0.0, "0 %"), (1.0, "< 1 %"), (593.0, "98 %"), (600.0, "100 %"), (700.0, "100 %")]
)
def test_only_a_complete_run_is_at_100_percent(judged: float, text: str) -> None:
    assert in_short(replace(FULL, judged=judged)).startswith(f"{text} of")


@pytest.mark.parametrize(
    ("state", "reached", "planned", "gap", "standing"),
    [
        ("running", 10, 600, 1, "running"),
        ("finished", 600, 600, 1, "finished"),
        ("finished", 599, 600, 1, "finished"),
        ("finished", 598, 600, 1, "finished_early"),
        ("finished", 590, 600, 10, "finished"),
        ("finished", 72, 600, 1, "finished_early"),
        ("finished", None, 600, 1, "finished_early"),
        ("finished", 72, None, 1, "finished"),
        ("finished", None, None, 1, "finished"),
        ("failed", 600, 600, 1, "failed"),
        ("silent", 600, None, 1, "silent"),
    ],
)
def test_the_standing_of_a_run(
    state: str, reached: int | None, planned: int | None, gap: float, standing: str
) -> None:
    assert standing_of(state, reached, planned, gap) == standing


def test_cadence_is_the_usual_distance_of_the_last_steps() -> None:
    assert cadence([]) == cadence([7]) == 1.0
    assert cadence(range(1, 100)) == 1.0
    assert cadence(range(0, 600, 10)) == 10.0
    # A single gap does not change the cadence.
    assert cadence([*range(50), *range(500, 510)]) == 1.0


@given(
    standing=st.sampled_from(STANDINGS),
    arm=st.lists(st.sampled_from(STANDINGS), max_size=4),
    judged=st.none() | st.floats(0, 2e6),
    planned=st.none() | st.floats(1, 2e6),
    waits=st.booleans(),
    measured=st.sampled_from(VERDICTS),
)
def test_a_good_verdict_needs_a_complete_finished_run(
    standing: Standing,
    arm: list[Standing],
    judged: float | None,
    planned: float | None,
    waits: bool,
    measured: str,
) -> None:
    coverage = Coverage(
        standing=standing,
        judged=judged,
        planned=planned,
        waits=waits,
        reached=5,
        baseline=BaselineArm(tuple(arm), 5, 1),
    )
    judgement = conclude(measured, coverage)
    if judgement.verdict in GOOD:
        assert standing == "finished" and "finished" in arm
        assert judged is not None and planned is not None and judged + 1 >= 0.98 * planned
        assert judgement.final
    assert judgement.final == (judgement.reason == "")
    assert Coverage.from_dict(coverage.as_dict()) == coverage
    assert judgement.as_dict()["coverage"]["share"] == coverage.share


def test_missing_steps_stand_beside_the_share_of_the_plan() -> None:
    """91,027 of 157,001 steps were dropped, and the verdict said '100 % of the planned run' only."""
    coverage = replace(FULL, missing=91_027, logged=157_001)
    assert in_short(coverage) == "100 % of the planned run, 58 % of its steps missing"
    assert "91,027 of its 157,001 steps are missing: dropped, or never received." in in_full(coverage)
    assert Coverage.from_dict(coverage.as_dict()) == coverage
    lacking = replace(FULL, baseline=replace(FINISHED, missing=40))
    assert in_full(lacking).endswith("Of a baseline run 40 steps are missing.")


@pytest.mark.parametrize(
    ("steps", "dropped", "missing"),
    [
        (range(1000), 0, 0),
        (range(1000), 70, 70),
        ([*range(100), *range(600, 1000)], 0, 500),
        (range(0, 1000, 10), 0, 0),
        ([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 999], 0, 0),
        ([5], 3, 0),
    ],
)
def test_steps_are_missing_that_were_dropped_or_never_came(
    steps: Sequence[int], dropped: int, missing: int
) -> None:
    assert missing_steps(list(steps), dropped)[0] == missing
