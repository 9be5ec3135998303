"""Comparisons of stored runs: their inputs, when they are repeated, and which runs a change concerns."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seed_groups import a_group_with_a_bad_seed

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import comparison_runs, reading, services
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.analysis.reading import read_arms
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations, summary_of
from fp8scope_dashboard.analysis.services import refresh
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import compaction
from fp8scope_dashboard.telemetry.models import Rolling

pytestmark = pytest.mark.django_db
STEPS = np.arange(1, 201)


def record(run: Run, factor: float = 1.0, steps: np.ndarray = STEPS, tokens: bool = False) -> Recorder:
    recorder = Recorder(run=run)
    scalars = {"loss": factor * (2.0 + 3.0 * np.exp(-steps / 40.0))}
    if tokens:
        scalars["tokens"] = steps * 64.0
    recorder.rows(steps, scalars, rows_per_batch=50)
    return recorder


@pytest.fixture
def arms(project: Project) -> tuple[Run, list[Recorder]]:
    """An FP8 run and three BF16 seeds."""
    baselines = [make_run(project, f"bf16 {seed}", group="bf16", seed=seed) for seed in range(3)]
    recorders = [record(run, 1.0 + 0.001 * seed, tokens=True) for seed, run in enumerate(baselines)]
    run = make_run(project, "fp8", baseline="bf16", precision="fp8")
    recorders += [record(run, 1.002, tokens=True)]
    for recorder in recorders:
        recorder.finish()
    return run, recorders[:-1]


def test_it_works(arms: tuple[Run, list[Recorder]]) -> None:
    run, _ = arms
    comparison = compare(run.id)
    assert comparison is not None and comparison.verdict == "equivalent"
    result = Comparison.objects.get(run=run).result
    assert (
        result["verdict"] == "equivalent" and result["k_baseline"] == 3 and result["aligned_on"] == "tokens"
    )
    assert result["delta"] == pytest.approx(0.001, abs=1e-4) and result["margin"] == 0.0025
    assert set(result) >= {
        "method", "interval", "tolerance", "k_run", "window", "loss", "baseline_loss", "explanation", "curve"
    }  # fmt: skip
    assert comparison.to_step == 200 and comparison.baseline == "bf16"


def test_unchanged_inputs_are_not_compared_again(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    first = compare(run.id)
    again = compare(run.id)
    assert first is not None and again is not None and first.computed_at == again.computed_at
    record(make_run(run.project, group="bf16"), 1.001, tokens=True)
    third = compare(run.id)
    assert third is not None and third.computed_at > first.computed_at and third.result["k_baseline"] == 4


def test_the_result_does_not_depend_on_how_the_rows_are_stored(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks only, chunks beside blocks and roll-ups, and all compacted."""
    monkeypatch.setattr(reading, "MAX_POINTS", 32)
    steps, noise = np.arange(9_000), np.random.default_rng(3).normal(0.0, 0.02, (2, 9_000))
    runs = [make_run(project, "bf16", group="bf16"), make_run(project, "fp8", baseline="bf16")]
    runs[1].precision, runs[1].total_steps = "fp8", 9_000
    runs[1].save()
    recorders = [Recorder(run=run) for run in runs]
    for recorder, own in zip(recorders, noise, strict=True):
        rate = 1e6 * np.exp(own)
        scalars = {"loss": 2.0 + 3.0 * np.exp(-steps / 3e3) + own, "tokens": 64.0 * (steps + 1)}
        recorder.rows(steps, scalars | {"tokens_per_second": rate}, rows_per_batch=600)
    results = [computed(runs[1])]
    compact(runs[0])
    results.append(computed(runs[1]))
    Run.objects.filter(pk=runs[0].pk).update(state=RunState.FINISHED)
    for run in runs:
        compact(run)
    assert Rolling.objects.get(run=runs[1]).until > 8_000
    results.append(computed(runs[1]))
    for other in results[1:]:
        assert flat(other) == pytest.approx(flat(results[0]), rel=1e-9, abs=1e-12)


def computed(run: Run) -> dict[str, object]:
    """The result of a comparison that a worker without anything in memory computes."""
    reading.forget()
    Comparison.objects.filter(run=run).delete()
    comparison = compare(run.id)
    assert comparison is not None
    result: dict[str, object] = comparison.result
    return result


def flat(value: object, name: str = "") -> dict[str, float]:
    """The numbers of a result by their place."""
    if isinstance(value, dict):
        return {key: each for part in value for key, each in flat(value[part], f"{name}.{part}").items()}
    if isinstance(value, (list, tuple)):
        return {key: each for i, part in enumerate(value) for key, each in flat(part, f"{name}.{i}").items()}
    return {name: float(value)} if isinstance(value, (int, float)) else {}


def compact(run: Run) -> None:
    while compaction.compact_run(run.id):
        pass


def test_a_new_margin_compares_again(arms: tuple[Run, list[Recorder]]) -> None:
    run, _ = arms
    compare(run.id)
    Project.objects.update(margin=0.5)
    comparison = compare(run.id)
    assert comparison is not None and comparison.result["tolerance"] == 0.5


def test_two_seeds_in_each_arm_are_tested(project: Project) -> None:
    for seed in range(2):
        record(make_run(project, group="bf16"), 1.0 + 0.0001 * seed).finish()
    runs = [make_run(project, group="fp8", baseline="bf16") for _ in range(2)]
    for seed, run in enumerate(runs):
        record(run, 1.0 + 0.0001 * seed).finish()
    refresh(runs[0].id)
    # A change of one run updates the comparisons of its whole group.
    assert [Comparison.objects.get(run=run).verdict for run in runs] == ["equivalent"] * 2
    assert Comparison.objects.get(run=runs[1]).result["k_run"] == 2


def test_new_rows_of_a_baseline_update_its_dependents(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    refresh(baselines[0].run.id)
    assert Comparison.objects.get().run_id == run.id


def test_the_sweeper_finds_uncompared_runs(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    assert comparison_runs.uncompared_runs() == [run.id]
    refresh(run.id)
    assert comparison_runs.uncompared_runs() == []
    baselines[0].evaluation(200, [1.0, 0.0])
    assert comparison_runs.uncompared_runs() == [run.id]


def test_an_expensive_comparison_of_a_running_run_is_postponed(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    Run.objects.filter(pk=run.pk).update(state="running")
    refresh(run.id)
    Comparison.objects.update(seconds=10.0)
    before = Comparison.objects.get().computed_at
    baselines[0].rows([201], {"loss": [2.0], "tokens": [201 * 64.0]})
    refresh(run.id)
    assert Comparison.objects.get().computed_at == before and comparison_runs.uncompared_runs() == [run.id]
    Comparison.objects.update(computed_at=before - timedelta(seconds=10.0 / services.TIME_SHARE))
    refresh(run.id)
    assert comparison_runs.uncompared_runs() == []


def test_a_finished_run_is_compared_at_once(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    refresh(run.id)
    Comparison.objects.update(seconds=1000.0)
    baselines[0].rows([201], {"loss": [2.0], "tokens": [201 * 64.0]})
    Run.objects.filter(pk=run.pk).update(state="finished")
    refresh(run.id)
    assert comparison_runs.uncompared_runs() == []


def test_without_a_baseline_there_is_no_comparison(project: Project) -> None:
    run = make_run(project, group="bf16")
    record(run)
    refresh(run.id)
    assert compare(run.id) is None and Comparison.objects.count() == 0


def test_the_explanation_names_a_missing_baseline(project: Project) -> None:
    run = make_run(project, baseline="bf16")
    record(run)
    comparison = compare(run.id)
    assert comparison is not None and comparison.verdict == "cannot_tell"
    assert "no run with a loss yet" in comparison.result["explanation"]


def test_a_diverged_run_is_over_and_can_be_stored(arms: tuple[Run, list[Recorder]]) -> None:
    run, _ = arms
    broken = make_run(run.project, baseline="bf16")
    losses = np.where(STEPS > 150, math.nan, 2.0)
    Recorder(run=broken).rows(STEPS, {"loss": losses})
    comparison = compare(broken.id)
    assert comparison is not None and comparison.verdict == "worse" and comparison.result["delta"] is None


def test_tokens_count_only_where_every_loss_has_them(project: Project) -> None:
    run = make_run(project)
    recorder = record(run, tokens=True)
    tokens = read_arms([run.id], [])[0][0].curve.tokens
    assert tokens is not None and tokens[-1] == 200 * 64.0
    recorder.rows([201], {"loss": [2.0]})
    assert read_arms([run.id], [])[0][0].curve.tokens is None


def test_scores_are_compared_step_by_step(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    mine = Recorder(run=run)
    for step, share in ((100, 0.6), (200, 0.2)):
        for seed, baseline in enumerate(baselines):
            baseline.evaluation(step, [1.0] * (58 + 2 * seed) + [0.0] * (42 - 2 * seed))
        right = int(100 * share)
        mine.evaluation(step, [1.0] * right + [0.0] * (100 - right))
    computed = compare_evaluations(run.id)
    assert {(comparison.step, comparison.verdict) for comparison in computed} == {
        (100, "cannot_tell"),
        (200, "worse"),
    }
    assert EvaluationComparison.objects.get(run=run, step=200).result["k_baseline"] == 3
    assert compare_evaluations(run.id) == []


def test_only_changed_scores_are_compared_again(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    mine = Recorder(run=run)
    for step in (100, 200):
        mine.evaluation(step, [1.0, 0.0, 1.0])
    compare_evaluations(run.id)
    baselines[0].evaluation(200, [1.0, 0.0, 0.0])
    (computed,) = compare_evaluations(run.id)
    assert computed.step == 200 and computed.verdict == "cannot_tell"


def test_the_tasks_of_a_step_are_compared_together(arms: tuple[Run, list[Recorder]]) -> None:
    """A new task changes the adjusted p-values of the others."""
    run, baselines = arms
    mine = Recorder(run=run)
    names = [str(i) for i in range(400)]
    for recorder, right in ((baselines[0], 200), (mine, 192)):
        items = [1.0] * right + [0.0] * (400 - right)
        recorder.evaluation(200, items, name="a", item_ids=names)
    (alone,) = compare_evaluations(run.id)
    assert alone.verdict == "worse" and alone.result["tasks"] == 1
    for name in "bcde":
        for recorder in (baselines[0], mine):
            recorder.evaluation(200, [1.0, 0.0] * 200, name=name, item_ids=names)
    together = compare_evaluations(run.id)
    assert [row.result["tasks"] for row in together] == [5] * 5
    assert together[0].verdict == "cannot_tell" and together[0].result["p_adjusted"] > 0.05
    assert [row.result["measured"] for row in together[1:]] == ["equivalent"] * 4
    assert summary_of(run, together).verdict == "cannot_tell"


def test_seeds_of_the_fp8_arm_are_averaged(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    Run.objects.filter(pk=run.pk).update(group="fp8")
    twin = Recorder(run=make_run(run.project, "fp8 2", group="fp8", baseline="bf16", precision="fp8"))
    for recorder in (baselines[0], baselines[1], Recorder(run=run), twin):
        recorder.evaluation(200, [1.0, 0.0] * 50)
    (computed,) = compare_evaluations(run.id)
    assert computed.result["k_run"] == 2 and computed.result["k_baseline"] == 2


def test_a_run_has_its_own_difference_beside_the_verdict_of_its_group(project: Project) -> None:
    """A run at +39 % among 15 showed '+2.70 %, cannot tell yet' as its own."""
    runs = a_group_with_a_bad_seed(project)
    for run in (runs[0], runs[7]):
        refresh(run.id)
    healthy, bad = (Comparison.objects.get(run=run) for run in (runs[0], runs[7]))
    assert bad.own_difference == pytest.approx(0.395, abs=0.002)
    assert healthy.own_difference == pytest.approx(0.0, abs=0.002)
    assert bad.result["delta"] == healthy.result["delta"] == pytest.approx(0.0277, abs=0.002)
    assert bad.result["own"]["left"] and not healthy.result["own"]["left"]
    assert healthy.result["group"]["name"] == "fp8" and len(healthy.result["group"]["runs"]) == 15
    left = [member for member in healthy.result["group"]["runs"] if member["left"]]
    assert [member["name"] for member in left] == ["fp8 7"]
    assert left[0]["from_group"] == pytest.approx(0.394, abs=0.002)
    assert any(text.startswith("fp8 7 left its group: +39.5 %") for text in healthy.result["warnings"])
    own = [member["difference"] for member in healthy.result["group"]["runs"]]
    assert np.mean(own) == pytest.approx(healthy.result["delta"])


def test_a_score_has_the_runs_own_difference_too(project: Project) -> None:
    runs = a_group_with_a_bad_seed(project)
    for run in (runs[0], runs[7]):
        compare_evaluations(run.id)
    healthy, bad = (EvaluationComparison.objects.get(run=run, name="gsm8k") for run in (runs[0], runs[7]))
    assert bad.own_difference is not None and bad.own_difference < -0.4
    assert healthy.own_difference == pytest.approx(0.0, abs=0.03)
    assert bad.result["difference"] == pytest.approx(healthy.result["difference"])
    assert bad.result["own"]["difference"] == bad.own_difference and bad.result["own"]["unit"] == "share"
    assert any(text.startswith("fp8 7 left its group") for text in healthy.result["warnings"])


def test_the_own_difference_of_a_single_run_is_that_of_the_comparison(
    arms: tuple[Run, list[Recorder]],
) -> None:
    run, baselines = arms
    baselines[0].evaluation(200, [1.0, 0.0] * 50)
    Recorder(run=run).evaluation(200, [1.0, 0.0] * 48 + [0.0] * 4)
    refresh(run.id)
    comparison, score = Comparison.objects.get(run=run), EvaluationComparison.objects.get(run=run)
    assert comparison.own_difference == comparison.result["delta"]
    assert score.own_difference == score.result["difference"] == pytest.approx(-0.02)
    assert comparison.result["group"]["name"] == "" and not comparison.result["own"]["left"]


def test_a_run_keeps_its_own_difference_beside_one_that_diverged(project: Project) -> None:
    for seed in range(3):
        record(make_run(project, f"bf16 {seed}", group="bf16", seed=seed), 1.0 + 0.0005 * seed).finish()
    runs = [make_run(project, f"fp8 {seed}", group="fp8", baseline="bf16") for seed in range(3)]
    for run in runs[:2]:
        record(run, 1.0015).finish()
    Recorder(run=runs[2]).rows(STEPS, {"loss": np.where(STEPS > 150, math.nan, 2.0)})
    comparison = compare(runs[0].id)
    assert comparison is not None and comparison.result["delta"] is None
    assert comparison.own_difference == pytest.approx(0.001, abs=5e-4)
    assert "fp8 2 left its group: its loss is not finite." in comparison.result["warnings"]


def test_comparisons_of_an_earlier_version_are_swept(arms: tuple[Run, list[Recorder]]) -> None:
    run, _ = arms
    refresh(run.id)
    comparison = Comparison.objects.get(run=run)
    Comparison.objects.update(inputs=f"v4{comparison.inputs[2:]}", own_difference=None)
    assert comparison_runs.uncompared_runs() == [run.id]
    refresh(run.id)
    assert Comparison.objects.get(run=run).own_difference is not None


def test_the_checkpoints_of_a_run_share_alpha(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    Run.objects.filter(pk=run.pk).update(total_steps=200, state=RunState.RUNNING)
    mine = Recorder(run=run)
    for step in (100, 150, 200):
        for recorder in (baselines[0], mine):
            recorder.evaluation(step, [1.0, 0.0] * 50)
    mine.evaluation(120, [1.0, 0.0] * 50)
    compare_evaluations(run.id)
    stored = {row.step: row.result for row in EvaluationComparison.objects.filter(run=run)}
    assert [stored[step]["checkpoint"] for step in (100, 150, 200)] == [1, 2, 3]
    assert [stored[step]["alpha_share"] for step in (100, 150, 200)] == pytest.approx([0.25, 0.125, 0.625])
    assert stored[120]["verdict"] == "cannot_tell" and stored[120]["k_baseline"] == 0


def test_the_precision_and_the_margin_of_an_evaluation(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    baselines[0].evaluation(200, [1.0, 0.0] * 50, precision="bf16", margin=0.2)
    Recorder(run=run).evaluation(200, [1.0, 0.0] * 50, precision="fp16", margin=0.2)
    (computed,) = compare_evaluations(run.id)
    assert computed.result["margin"] == 0.2 and computed.verdict == "equivalent"
    overflow, mismatch = computed.result["warnings"]
    assert "overflow" in overflow and "the baseline in BF16" in mismatch


def test_the_later_of_two_scores_of_a_step_counts(arms: tuple[Run, list[Recorder]]) -> None:
    run, _ = arms
    mine = Recorder(run=run)
    mine.evaluation(100, [0.0, 0.0, 1.0])
    mine.evaluation(100, [1.0, 1.0, 0.0])
    compare_evaluations(run.id)
    assert EvaluationComparison.objects.get(run=run).result["score"] == pytest.approx(2 / 3)


def test_scores_that_are_nan_are_worse(arms: tuple[Run, list[Recorder]]) -> None:
    run, baselines = arms
    for baseline in baselines:
        baseline.evaluation(100, [2.0, 2.5], metric="nll", kind="mean", higher_is_better=False)
    Recorder(run=run).evaluation(100, [math.nan, 2.0], metric="nll", kind="mean", higher_is_better=False)
    (computed,) = compare_evaluations(run.id)
    assert computed.verdict == "worse"


def test_ignores_a_deleted_run(project: Project) -> None:
    run = make_run(project, baseline="bf16")
    run_id = run.id
    run.delete()
    refresh(run_id)
    assert compare(run_id) is None and compare_evaluations(run_id) == []
