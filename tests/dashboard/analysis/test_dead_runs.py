"""A run or baseline that did not finish as planned gets no good verdict."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.analysis.services import refresh
from fp8scope_dashboard.analysis.verdict_coverage import judged_now, standing_now
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.runs.services import register

pytestmark = pytest.mark.django_db
PLANNED = 600
# With equal items, two seeds and 500 items show equivalence.
SCORES = [1.0, 0.0] * 250
Ending = Callable[[Recorder], None]


def finished(recorder: Recorder) -> None:
    recorder.finish()


def failed(recorder: Recorder) -> None:
    recorder.finish("RuntimeError: out of memory")


def silent(recorder: Recorder) -> None:
    Run.objects.filter(pk=recorder.run.pk).update(state="silent")


def running(recorder: Recorder) -> None:
    """The run keeps running."""


def record(run: Run, steps: int, ending: Ending = finished, *, first: int = 1, every: int = 1) -> Recorder:
    recorder = Recorder(run=run)
    logged = np.arange(first, steps + 1, every)
    scalars = {"loss": 2.0 + 3.0 * np.exp(-logged / 40.0), "tokens": logged * 64.0}
    recorder.rows(logged, scalars, rows_per_batch=200)
    for step in sorted({min(72, steps), steps}):
        recorder.evaluation(step, SCORES)
    ending(recorder)
    run.refresh_from_db()
    return recorder


def baselines(project: Project, steps: int = PLANNED, ending: Ending = finished, count: int = 2) -> None:
    for seed in range(count):
        record(make_run(project, group="bf16", seed=seed, total_steps=PLANNED), steps, ending)


def judged(run: Run) -> tuple[Comparison, EvaluationComparison]:
    """The comparisons that a worker stores, which must equal those that the pages and the API show."""
    refresh(run.id)
    run = Run.objects.select_related("comparison").get(pk=run.pk)
    score = EvaluationComparison.objects.filter(run=run).order_by("-step").first()
    assert score is not None
    assert judged_now(run, run.comparison).verdict == run.comparison.verdict
    assert judged_now(run, score).verdict == score.verdict
    return run.comparison, score


def test_it_works(project: Project) -> None:
    baselines(project)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    record(run, PLANNED)
    loss, score = judged(run)
    assert (loss.verdict, score.verdict) == ("equivalent", "equivalent")
    assert loss.result["final"] and loss.result["reason"] == ""
    coverage = loss.result["coverage"]
    assert coverage["share"] == 1.0 and coverage["judged"] == coverage["planned"] == 600.0
    assert coverage["plan"] == "total_steps" and coverage["baseline"]["standings"] == ["finished"] * 2


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (failed, "failed at step 72 of 600"),
        (silent, "silent at step 72 of 600"),
        (finished, "finished early, at step 72 of 600"),
    ],
)
def test_a_run_that_ends_at_step_72_of_600_is_incomplete(
    project: Project, ending: Ending, words: str
) -> None:
    baselines(project)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    record(run, 72, ending)
    loss, score = judged(run)
    assert (loss.verdict, score.verdict) == ("incomplete", "incomplete")
    assert loss.result["measured"] == "equivalent" and score.result["measured"] == "equivalent"
    assert words in loss.result["reason"] and words in score.result["reason"]
    assert loss.result["coverage"]["share"] == pytest.approx(0.12)
    assert not loss.result["final"] and not score.result["final"]


def test_a_running_run_is_pending_until_it_finishes(project: Project) -> None:
    baselines(project)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    recorder = record(run, PLANNED, running)
    loss, score = judged(run)
    assert (loss.verdict, score.verdict) == ("pending", "pending")
    assert comparison_runs.uncompared_runs() == []
    recorder.finish()
    # The page shows it at once; the sweeper compares the run again if the notification was lost.
    assert judged_now(recorder.run, Comparison.objects.get(run=run)).verdict == "equivalent"
    assert comparison_runs.uncompared_runs() == [run.id]
    assert judged(run)[0].verdict == "equivalent"


@pytest.mark.parametrize(
    ("steps", "ending", "verdict", "words"),
    [
        (PLANNED, failed, "incomplete", "No baseline run finished as planned: 2 failed"),
        (PLANNED, silent, "incomplete", "2 went silent"),
        (300, finished, "incomplete", "2 finished early, the furthest at step 300"),
        (300, failed, "incomplete", "2 failed, the furthest at step 300"),
        (PLANNED, running, "pending", "The baseline has not finished yet."),
    ],
)
def test_the_reason_names_a_dead_or_short_baseline(
    project: Project, steps: int, ending: Ending, verdict: str, words: str
) -> None:
    baselines(project, steps, ending)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    recorder = record(run, PLANNED, running)
    recorder.evaluation(steps, SCORES)
    recorder.finish()
    loss, score = judged(run)
    assert loss.verdict == verdict and words in loss.result["reason"]
    measured = EvaluationComparison.objects.get(run=run, step=steps)
    assert measured.result["measured"] == "equivalent" and measured.verdict == verdict


def test_a_dead_baseline_seed_is_left_out_and_named(project: Project) -> None:
    baselines(project)
    record(make_run(project, group="bf16", total_steps=PLANNED), 72, failed)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    record(run, PLANNED)
    loss, _ = judged(run)
    assert loss.verdict == "equivalent" and loss.result["coverage"]["baseline"]["left_out"] == 1


def test_the_longest_run_replaces_a_missing_plan(project: Project) -> None:
    for _ in range(2):
        record(make_run(project, group="bf16"), PLANNED)
    short, full = make_run(project, baseline="bf16"), make_run(project, baseline="bf16", group="full")
    record(short, 150)
    record(full, PLANNED)
    loss, score = judged(short)
    assert (loss.verdict, score.verdict) == ("cannot_tell", "cannot_tell")
    coverage = loss.result["coverage"]
    assert coverage["plan"] == "longest_run" and coverage["unit"] == "tokens"
    assert coverage["share"] == 0.25
    assert [comparison.verdict for comparison in judged(full)] == ["equivalent", "equivalent"]


def test_a_run_longer_than_its_baseline_is_judged_in_part(project: Project) -> None:
    for _ in range(2):
        record(make_run(project, group="bf16"), 300)
    run = make_run(project, baseline="bf16")
    record(run, PLANNED)
    loss, _ = judged(run)
    assert loss.verdict == "cannot_tell" and loss.result["coverage"]["share"] == 0.5
    assert "2 times as long as its baseline's" in loss.result["warnings"][0]
    assert "covers the run up to 19,200 tokens only" in loss.result["reason"]


def test_a_resumed_run_is_judged_by_its_latest_attempt(project: Project) -> None:
    baselines(project)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    record(run, PLANNED)
    again = Recorder(run=run)
    Writer.objects.filter(uuid=again.uuid).update(attempt=1)
    again.rows(np.arange(300, 373), {"loss": 2.0 + 3.0 * np.exp(-np.arange(300, 373) / 40.0)})
    again.finish()
    refresh(run.id)
    run = Run.objects.select_related("comparison").get(pk=run.pk)
    assert run.last_step == PLANNED and run.state == "finished"
    assert run.comparison.verdict == "incomplete" and standing_now(run) == "finished_early"
    assert "finished early, at step 372 of 600" in run.comparison.result["reason"]


def test_ignores_the_failure_of_an_earlier_attempt(project: Project) -> None:
    baselines(project)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    record(run, 100, failed)
    again = Recorder(run=run)
    Writer.objects.filter(uuid=again.uuid).update(attempt=1)
    steps = np.arange(90, PLANNED + 1)
    again.rows(steps, {"loss": 2.0 + 3.0 * np.exp(-steps / 40.0)}, rows_per_batch=200)
    Run.objects.filter(pk=run.pk).update(state="running")
    again.finish()
    comparison = compare(run.id)
    assert comparison is not None and comparison.verdict == "equivalent"


def test_a_later_attempt_may_plan_more_steps(project: Project) -> None:
    run, _ = register(make_run(project, total_steps=300).id, project, {"total_steps": 600})
    assert run.total_steps == 600
    register(run.id, project, {"total_steps": 300})
    assert Run.objects.get(pk=run.pk).total_steps == 600


def test_a_run_that_logs_every_tenth_step_counts_as_complete(project: Project) -> None:
    baselines(project)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    record(run, 599, first=0, every=10)
    assert judged(run)[0].verdict == "equivalent"


def test_comparisons_of_an_earlier_version_are_computed_again(project: Project) -> None:
    baselines(project)
    run = make_run(project, baseline="bf16", total_steps=PLANNED)
    record(run, PLANNED)
    refresh(run.id)
    Run.objects.update(heartbeat_at="2020-01-01T00:00:00Z")
    assert comparison_runs.uncompared_runs() == []
    Comparison.objects.update(inputs="1800 rows, 3 scores, 0.0025, 0.05", result={"verdict": "equivalent"})
    assert comparison_runs.uncompared_runs() == [run.id]
