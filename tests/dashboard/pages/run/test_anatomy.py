"""Where a step's time goes: shares, the verdict of waiting, and ranks part by part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, get_json, trace_values

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.run.anatomy.card import RankTimes, anatomy_of, describe
from fp8scope_dashboard.pages.run.anatomy.parts import PARTS, SCALARS, read_shares, scalar_of, shares_of
from fp8scope_dashboard.pages.run.anatomy.stragglers import scores_of, spreads_of
from fp8scope_dashboard.pages.run.anatomy.verdict import WAIT_BOUND, judge_waits
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import THIN

STEPS = 300
TYPICAL = {"forward": 0.1, "loss": 0.01, "backward": 0.15, "optimizer": 0.012, "rest": 0.012, "data": 0.128}
"""Seconds of a step of 412 ms that waits for data in 31 % of it."""


def scalars(steps: int = STEPS, **seconds: float) -> dict[str, Floats]:
    return {scalar_of(part): np.full(steps, value) for part, value in {**TYPICAL, **seconds}.items()}


def times(*ranks: Mapping[str, float], steps: int = 40, launch: float = np.nan) -> RankTimes:
    """Ranks whose steps are all alike."""
    means = np.array([[{**TYPICAL, **rank}.get(part, 0.0) for part in PARTS] for rank in ranks])
    return RankTimes(
        ranks=list(range(len(ranks))),
        seconds=np.repeat(means[:, :, None], steps, axis=2),
        launch=np.full((len(ranks), steps), launch),
    )


@pytest.fixture
def measured(admin: Visitor) -> Run:
    """Two ranks, of which one is slow in its forward pass, and saves in some steps. The other waits."""
    run = make_run(admin.project, "two ranks")
    steps = np.arange(STEPS)
    saves = np.where(steps % 50 == 49, 1.0, 0.0)
    waiting = {**scalars(communication=0.2), "launch_bound_seconds": np.full(STEPS, 0.0612)}
    Recorder(run=run, rank=0).rows(steps, waiting)
    Recorder(run=run, rank=1).rows(steps, {**scalars(forward=0.3), scalar_of("checkpoint"): saves})
    run.refresh_from_db()
    return run


def test_it_works(admin: Visitor, measured: Run) -> None:
    """One page, so that the test makes one run: the sentence first, then the chart and the ranks."""
    page = admin.client.get(admin.address(f"runs/{measured.id}/?tab=efficiency")).content.decode()
    text = page.replace(THIN, " ")
    assert "A step takes 612 ms on rank 0; 33 % is waiting for other ranks." in text
    assert "Wait-bound" in text and "The lowest straggler score is 0.67, of rank 1." in text
    assert "Rank 1 is a straggler" in text and "forward, 100 ms more in a step" in text
    assert text.index("A step takes") < text.index("figures/anatomy.json") < text.index("Skew")
    assert "<dd>10 %</dd>" in text
    answer = get_json(admin, f"runs/{measured.id}/figures/anatomy.json")
    traces = {trace["name"]: trace_values(trace["y"]) for trace in answer["figure"]["data"]}
    assert traces["Forward"] == pytest.approx(0.1 / 0.612) and "Checkpoint" not in traces
    assert np.sum(list(traces.values()), axis=0) == pytest.approx(1)
    assert f"Communication 32.7{THIN}%" in answer["summary"]


def test_shares_are_sums_over_a_bucket(measured: Run) -> None:
    """A part that occurs in one step of fifty is not taken for one that occurs in each."""
    saved = scalar_of("checkpoint")
    later = Recorder(run=measured, rank=0, attempt=1)
    later.rows(np.arange(320, 350), scalars(30))
    later.rows([350], {**scalars(1), saved: [41.2]})
    later.rows(np.arange(351, 384), scalars(33))
    shown = read_shares(measured.id, first=320, last=383, points=1)
    share = 41.2 / (41.2 + 64 * 0.412)
    assert shown.shares[PARTS.index("checkpoint")] == pytest.approx(share) and shown.x[0] == (320 + 383) / 2
    of_steps = read_shares(measured.id, first=320, last=None, points=400)
    assert of_steps.x.tolist() == list(range(320, 384))
    assert np.flatnonzero(of_steps.shares[PARTS.index("checkpoint")]).tolist() == [30]
    # The ranks of the latest attempt are compared, not those of the one that it replaced.
    measured.refresh_from_db()
    card = anatomy_of(measured)
    assert card is not None and card.ranks == 1 and card.parts == [] and card.steps == 64


def test_a_run_without_an_anatomy_has_no_card(admin: Visitor) -> None:
    run = make_run(admin.project, "bare")
    Recorder(run=run).rows(np.arange(5), {"loss": np.ones(5)})
    run.refresh_from_db()
    assert anatomy_of(run) is None
    assert "run.watch" in get_json(admin, f"runs/{run.id}/figures/anatomy.json")["empty"]


def test_the_sentence_names_the_largest_wait() -> None:
    assert describe(times({})).sentence == "A step takes 412 ms; 31 % is waiting for data."
    busy = describe(times({"data": 0.001, "backward": 1.0}))
    assert busy.sentence == "A step takes 1.14 s; 99 % is forward, loss, backward and optimizer."
    assert describe(times({}, steps=3)).reason.startswith("3 measured steps are too few")


def test_the_launch_bound_share_is_said_where_a_device_says_it() -> None:
    assert describe(times({}, launch=0.0412)).launch == "10 %"
    assert describe(times({})).launch == ""


@pytest.mark.parametrize(("share", "verdict"), [(0.3, "waits"), (0.02, "works")])
def test_waits_are_judged_by_their_interval(share: float, verdict: str) -> None:
    noise = np.random.default_rng(1).normal(1.0, 0.05, (2, 200))
    judged = judge_waits(share * noise[0], share * noise[0] + (1 - share) * noise[1])
    assert judged.verdict == verdict and judged.low < share < judged.high


def test_one_long_wait_is_no_verdict() -> None:
    """A checkpoint of a minute says nothing of the next steps."""
    waits, work = np.zeros(200), np.ones(200)
    waits[70] = 60.0
    judged = judge_waits(waits, waits + work)
    assert judged.share > WAIT_BOUND and judged.verdict == "unknown"


def test_the_interval_has_its_coverage() -> None:
    """Over serially correlated waits: 95 % less what ten groups cost (400 series)."""
    generator = np.random.default_rng(7)
    inside = 0
    for _ in range(400):
        shocks = generator.normal(0, 0.2, 200)
        for i in range(1, 200):
            shocks[i] += 0.5 * shocks[i - 1]
        waits = 0.2 * np.exp(shocks)
        expected = 0.2 * np.exp(0.04 / (1 - 0.25) / 2)
        judged = judge_waits(waits, waits + 0.8)
        inside += judged.low <= expected / (expected + 0.8) <= judged.high
    assert 0.9 <= inside / 400 <= 0.98


def test_skew_is_that_of_the_slowest_rank_over_the_median() -> None:
    of_ranks = times({}, {}, {"data": 0.256}, {"checkpoint": 0.5})
    spreads = {spread.part: spread for spread in spreads_of(of_ranks.ranks, of_ranks.seconds)}
    assert spreads["data"].skew == pytest.approx(1.0) and spreads["data"].worst_rank == 2
    assert spreads["forward"].skew == pytest.approx(0.0)
    assert spreads["checkpoint"].skew is None and spreads["checkpoint"].worst_rank == 3
    assert "copy" not in spreads


def test_a_straggler_is_slow_where_it_does_not_wait() -> None:
    """The ranks that wait for it have longer communication, and are none."""
    of_ranks = times({"communication": 0.3}, {"forward": 0.4}, {"communication": 0.3}, {"communication": 0.3})
    scores = scores_of(of_ranks.ranks, of_ranks.seconds)
    assert [score.is_straggler for score in scores] == [False, True, False, False]
    assert scores[1].score == pytest.approx(0.412 / 0.712)
    assert scores[1].part == "forward" and scores[1].beyond == pytest.approx(0.3)
    # A rank with little to do accuses nobody.
    idle = times({}, {}, {}, dict.fromkeys(TYPICAL, 0.01))
    assert all(score.score == 1.0 for score in scores_of(idle.ranks, idle.seconds))
    assert scores_of([0, 1], times({}, {}).seconds * 1e-4) == []


def test_invalid_times_are_left_out() -> None:
    seconds = np.ones((len(PARTS), 4))
    seconds[0, 1], seconds[1, 2], seconds[:, 3] = np.nan, -1.0, 0.0
    shown = shares_of(np.arange(4.0), seconds)
    assert shown.x.tolist() == [0.0] and shown.shares[0, 0] == pytest.approx(1 / len(PARTS))


def test_every_part_has_a_help_text() -> None:
    assert all(glossary.GLOSSARY[name].definition for name in SCALARS)
