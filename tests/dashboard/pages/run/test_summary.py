"""The summary at the head of the page of a run, and the badges of verdicts."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, run_html
from django.urls import reverse
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import RUN_WIDE, DetectorState, Rule
from fp8scope_dashboard.analysis.coverage import BaselineArm, Coverage, conclude
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.badges import SO_FAR, VERDICTS, loss_badge, score_badge
from fp8scope_dashboard.pages.charts.arms import FP8_SLOTS, Arms, arm_labels
from fp8scope_dashboard.pages.run.summary import (
    Gauge,
    ShownVerdict,
    baseline_groups,
    progress_of,
    summarise,
    verdict_of,
)
from fp8scope_dashboard.runs.models import Run, RunState

FULL = Coverage(
    standing="finished",
    judged=600.0,
    planned=600.0,
    plan="total_steps",
    reached=600,
    baseline=BaselineArm(("finished",), 600),
)


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    summary = summarise(seeded.faulty)
    assert summary.verdict.badge.label == "Worse than BF16"
    assert summary.overflow is not None and summary.overflow.badge.tone == "danger"
    assert all("mlp.down.input" in worst.name for worst in summary.overflow.worst)
    assert summary.overflow.observed == 48 and 6 <= summary.overflow.overflowing < 48
    assert summary.open_alerts >= 2 and summary.alerts[0].severity == "critical"
    assert {score.metric for score in summary.scores} == {"accuracy", "nll"}


def test_summarises_a_healthy_run(admin: Visitor, seeded: Seeded) -> None:
    summary = summarise(seeded.healthy)
    assert summary.verdict.badge.tone == "good" and summary.open_alerts == 0
    assert summary.verdict.seeds == 3 and summary.verdict.baseline == "bf16"
    gauge = summary.verdict.gauge
    assert gauge is not None and gauge.low < gauge.point < gauge.high


def test_says_what_the_rules_cannot_judge(viewer: Visitor, seeded: Seeded) -> None:
    rule = Rule.objects.get(project=viewer.project, kind="above_baseline", run=None)
    shared, _ = DetectorState.objects.get_or_create(run=seeded.healthy, writer=RUN_WIDE)
    shared.state[str(rule.pk)] = {"note": "Cannot compare: no common steps."}
    shared.save()
    assert summarise(seeded.healthy).unjudged == ["Cannot compare: no common steps."]
    page = viewer.client.get(viewer.address(f"runs/{seeded.healthy.id}/")).content.decode()
    assert "FP8 above baseline: Cannot compare: no common steps." in page


def test_shows_progress_and_lost_points(admin: Visitor) -> None:
    run = make_run(admin.project, "r", total_steps=200, last_step=50, points_stored=90, points_sent=100)
    summary = summarise(run)
    assert summary.lost == 10 and progress_of(run).percent == 25.0 and progress_of(run).is_live
    assert progress_of(make_run(admin.project, "s")).percent is None
    beyond = make_run(admin.project, "t", total_steps=10, last_step=50)
    assert progress_of(beyond).percent == 100.0 and summarise(beyond).lost is None


def test_the_head_leads_to_a_comparison_with_the_baseline(viewer: Visitor) -> None:
    baseline = make_run(viewer.project, "b", precision="bf16", group="bf16")
    run = make_run(viewer.project, "r", precision="fp8", baseline="bf16")
    page = run_html(viewer, run)
    for name in ("compare", "shared_report_new"):
        address = reverse(name, args=[viewer.project.slug])
        assert f'href="{address}?runs={run.pk}&amp;runs={baseline.pk}"' in page


def test_positions_on_the_gauge() -> None:
    gauge = Gauge.of(0.01, 0.01, (0.0, 0.02))
    assert (gauge.low, gauge.high, gauge.point) == (33.33, 66.67, 66.67)
    assert gauge.whisker == (50.0, 33.33) and not gauge.off_scale
    assert gauge.whisker_style == "left:50.00%;width:33.33%"
    far = Gauge.of(-5.0, 0.01, None)
    assert far.point == 0.0 and far.off_scale and not far.whisker_style


def test_differences_in_words() -> None:
    verdict = ShownVerdict(badge=VERDICTS["worse"], delta=0.01, tolerance=0.0025, own=-0.02)
    assert verdict.gauge_label == "Delta +1.00\u202f%, tolerance plus or minus 0.25\u202f%"
    assert verdict.own_in_words == "\u22122.00\u202f%"
    without = replace(verdict, own=None)
    assert without.own_in_words == "\u2013"
    assert replace(without, has_left=True).own_in_words == "not finite"


@pytest.mark.parametrize("verdict", ["equivalent", "worse", "better", "cannot_tell"])
def test_every_verdict_has_a_badge(admin: Visitor, verdict: str) -> None:
    run = make_run(admin.project, "r", baseline="bf16", state="finished", total_steps=600, last_step=600)
    result = conclude(verdict, FULL).as_dict()
    Comparison.objects.create(run=run, baseline="bf16", to_step=600, verdict=verdict, result=result)
    shown = verdict_of(Run.objects.select_related("comparison").get(), set())
    assert shown.badge is VERDICTS[verdict] and shown.gauge is None
    assert shown.final and shown.share == "100 % of the planned run"


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.SILENT, RunState.RUNNING])
@pytest.mark.parametrize("verdict", ["equivalent", "better"])
def test_a_stored_good_verdict_is_not_shown_as_good_unless_the_run_finished(
    admin: Visitor, verdict: str, state: RunState
) -> None:
    run = make_run(admin.project, "r", baseline="bf16", state=state, total_steps=600, last_step=600)
    result = conclude(verdict, FULL).as_dict()
    Comparison.objects.create(run=run, baseline="bf16", to_step=600, verdict=verdict, result=result)
    shown = verdict_of(Run.objects.select_related("comparison").get(), set())
    assert shown.badge.tone == ("neutral" if state == RunState.RUNNING else "warning")
    assert shown.badge.icon != "check" and shown.reason and not shown.final


@pytest.mark.parametrize("state", list(RunState))
def test_a_verdict_without_its_coverage_is_never_good(admin: Visitor, state: RunState) -> None:
    run = make_run(admin.project, "r", baseline="bf16", state=state, last_step=600)
    Comparison.objects.create(run=run, baseline="bf16", to_step=600, verdict="equivalent", result={})
    shown = verdict_of(Run.objects.select_related("comparison").get(), set())
    assert shown.badge.tone in ("neutral", "warning") and shown.reason


def test_an_unknown_verdict_is_shown_as_unknown() -> None:
    assert loss_badge(conclude("splendid", FULL), has_baseline=True, is_baseline=False).label == "Unknown"


def test_a_verdict_so_far_looks_different_from_a_final_one() -> None:
    for measured, badge in SO_FAR.items():
        judgement = conclude(measured, replace(FULL, standing="running", judged=72.0))
        assert loss_badge(judgement, has_baseline=True, is_baseline=False) is badge
        assert (badge.tone, badge.icon) != (VERDICTS[measured].tone, VERDICTS[measured].icon)


def test_lists_the_baselines_that_runs_refer_to(admin: Visitor, stranger: Visitor) -> None:
    make_run(admin.project, "a", baseline="bf16")
    make_run(admin.project, "b")
    make_run(stranger.project, "c", baseline="theirs")
    assert baseline_groups(admin.project.pk) == {"bf16"}


@pytest.mark.parametrize(
    ("verdict", "label", "tone"),
    [
        ("equivalent", "Equivalent to BF16", "good"),
        ("worse", "Worse than BF16", "danger"),
        ("better", "Better than BF16", "good"),
        ("cannot_tell", "Cannot tell yet", "neutral"),
        ("splendid", "Unknown", "neutral"),
    ],
)
def test_badges_of_scores(verdict: str, label: str, tone: str) -> None:
    badge = score_badge(conclude(verdict, FULL))
    assert (badge.label, badge.tone) == (label, tone)


@pytest.mark.parametrize(
    ("coverage", "label", "tone"),
    [
        (replace(FULL, standing="failed"), "Incomplete", "warning"),
        (replace(FULL, judged=300.0), "Equivalent at 50 %", "neutral"),
        (replace(FULL, standing="running", judged=300.0), "Equivalent at 50 %", "neutral"),
        (replace(FULL, standing="running", judged=300.0, planned=None), "Equivalent so far", "neutral"),
    ],
)
def test_an_equivalent_score_on_part_of_the_run_is_not_good(
    coverage: Coverage, label: str, tone: str
) -> None:
    badge = score_badge(conclude("equivalent", coverage))
    assert (badge.label, badge.tone) == (label, tone)


def test_arms_keep_their_slots_when_groups_are_added(admin: Visitor) -> None:
    first = make_run(admin.project, "a", precision="fp8", group="delayed")
    assert Arms(admin.project).of(first).slot == FP8_SLOTS[0]
    second = make_run(admin.project, "b", precision="fp8", group="current")
    arms = Arms(admin.project)
    assert arms.of(first).slot == FP8_SLOTS[0] and arms.of(second).slot == FP8_SLOTS[1]
    assert arms.of(second).label == "FP8 · current"


def test_runs_without_a_group_have_slots_of_their_own(admin: Visitor) -> None:
    alone = [make_run(admin.project, str(i), precision="fp8") for i in range(2)]
    grouped = make_run(admin.project, "c", precision="fp8", group="delayed")
    arms = Arms(admin.project)
    assert [arms.of(run).slot for run in (*alone, grouped)] == list(FP8_SLOTS[:3])


def test_slots_of_bf16_and_unknown_precisions(admin: Visitor) -> None:
    bf16 = make_run(admin.project, "x", precision="bf16", group="bf16")
    odd = make_run(admin.project, "y", precision="int4")
    arms = Arms(admin.project)
    assert (arms.of(bf16).label, arms.of(bf16).slot) == ("BF16", "bf16")
    assert (arms.of(odd).label, arms.of(odd).slot) == ("y", "other")


def test_seeds_are_counted_in_the_legend(admin: Visitor) -> None:
    runs = [make_run(admin.project, str(i), precision="bf16", group="bf16", seed=i) for i in range(3)]
    assert set(arm_labels(Arms(admin.project), runs).values()) == {"BF16 (3 seeds)"}


def test_counts_of_tensors_of_an_ended_run_are_those_of_a_running_one(project: Project) -> None:
    run = make_run(project, precision="fp8")
    recorder = Recorder(run=run, tensors=["a.input", "b.input"])
    statistics = {"saturated": np.tile([5.0, 0.0], (10, 1)), "nonfinite": np.zeros((10, 2))}
    recorder.rows(np.arange(10), {"loss": np.ones(10)}, {**statistics, "numel": np.full((10, 2), 1000.0)})
    recorder.finish()
    running = summarise(Run.objects.get(pk=run.pk)).overflow
    Run.objects.update(heartbeat_at=timezone.now() - timedelta(hours=1))
    ended = Run.objects.get(pk=run.pk)
    assert running is not None and (running.observed, running.overflowing) == (2, 1)
    assert summarise(ended).overflow == summarise(ended).overflow == running
