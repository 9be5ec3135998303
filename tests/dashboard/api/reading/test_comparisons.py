"""Verdicts over HTTP: of a run, of its scores, and of two runs."""

from __future__ import annotations

import pytest
from dashboard.helpers.reading import Reader
from dashboard.helpers.recording import make_run
from dashboard.helpers.seed_groups import a_group_with_a_bad_seed
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.pages.charts.arms import Arms
from fp8scope_dashboard.pages.formatting import number, percent
from fp8scope_dashboard.pages.scores.forest import forest_rows, latest_comparisons


def test_it_works(reader: Reader, seeded: Seeded) -> None:
    pair = reader.json("/compare", a=seeded.baselines[1].pk, b=seeded.healthy.pk)
    assert pair["judged"]["name"] == seeded.healthy.name and pair["reason"] == ""
    stored = seeded.healthy.comparison.result
    verdict = pair["verdict"]
    assert verdict["delta"] == stored["delta"] and verdict["interval"] == list(stored["interval"])
    assert (verdict["margin"], verdict["tolerance"]) == (stored["margin"], stored["tolerance"])
    assert verdict["baseline"] == "bf16" and verdict["baseline_runs"] == 3
    assert verdict == reader.json(f"/runs/{seeded.healthy.pk}/verdict")


def test_the_order_of_two_runs_does_not_matter(reader: Reader, seeded: Seeded) -> None:
    a, b = seeded.baselines[0].pk, seeded.faulty.pk
    there, back = reader.json("/compare", a=a, b=b), reader.json("/compare", a=b, b=a)
    assert there["verdict"] == back["verdict"] and there["judged"] == back["judged"]
    assert (there["a"], there["b"]) == (back["b"], back["a"])


def test_runs_that_are_not_compared_have_a_reason(reader: Reader, seeded: Seeded) -> None:
    def reason(a: object, b: object) -> str:
        pair = reader.json("/compare", a=a, b=b)
        assert pair["verdict"] is None and pair["judged"] is None and pair["evaluations"] == []
        return str(pair["reason"])

    assert "seeds of the group “bf16”" in reason(seeded.baselines[0].pk, seeded.baselines[1].pk)
    assert "Neither run" in reason(seeded.healthy.pk, seeded.faulty.pk)
    assert "one run" in reason(seeded.healthy.pk, seeded.healthy.pk)


def test_a_comparison_that_has_not_been_made_says_so(reader: Reader, viewer: Visitor) -> None:
    baseline = make_run(viewer.project, "bf16", group="bf16", precision="bf16")
    run = make_run(viewer.project, "fp8", baseline="bf16")
    pair = reader.json("/compare", a=baseline.pk, b=run.pk)
    assert pair["judged"]["id"] == str(run.pk) and pair["verdict"]["verdict"] == ""
    assert "once both sides have logged a loss" in pair["reason"]


def test_runs_of_other_projects_are_unknown(reader: Reader, seeded: Seeded) -> None:
    foreign = make_run(create_project("elsewhere", "Elsewhere"), "foreign")
    assert reader.refused("/compare", a=seeded.healthy.pk, b=foreign.pk)["code"] == "unknown_run"
    assert reader.refused(f"/runs/{foreign.pk}/verdict")["code"] == "unknown_run"


@pytest.mark.slow
def test_a_group_names_the_seed_that_left(reader: Reader, viewer: Visitor) -> None:
    runs = a_group_with_a_bad_seed(viewer.project, seeds=6, bad=2)
    for run in runs:
        compare(run.pk)
    pair = reader.json("/compare", a=runs[0].pk, b=viewer.project.runs.get(name="bf16 0").pk)
    left = [member["name"] for member in pair["verdict"]["members"] if member["left"]]
    assert left == ["fp8 2"] and len(pair["verdict"]["members"]) == 6
    bad = reader.json(f"/runs/{runs[2].pk}/verdict")
    assert bad["left"] and bad["own"] > 0.3


def test_scores_are_those_of_the_forest_plot(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    for run in (seeded.healthy, seeded.faulty):
        judged = reader.json(f"/runs/{run.pk}/evaluations")["comparisons"]
        rows = forest_rows(viewer.project, latest_comparisons(viewer.project, [run.pk]), Arms(viewer.project))
        by_task = {(row.name, row.metric): row for row in rows}
        assert len(judged) == len(rows) > 0
        for score in judged:
            row = by_task[score["name"], score["metric"]]
            size = percent if score["metric"] == "accuracy" else number
            assert size(score["score"]) == row.score and size(score["baseline_score"]) == row.baseline_score
            assert score["label"] == row.badge["label"] and score["explanation"] == row.explanation
            assert score["step"] == row.step and score["items"] == row.items


def test_scores_have_the_intervals_of_their_chart(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    scores = reader.json(f"/runs/{seeded.healthy.pk}/evaluations")["scores"]
    assert len(scores) == Evaluation.scores.filter(run=seeded.healthy).count() > 0
    accuracy = [score for score in scores if score["metric"] == "accuracy"]
    table = reader.json("/figures/scores", name="heldout", metric="accuracy", format="json")
    columns = {column["name"]: column["values"] for column in table["columns"]}
    drawn = {
        (name, at): (value, low, high) for name, at, value, low, high in zip(*columns.values(), strict=True)
    }
    for score in accuracy:
        value, low, high = drawn[f"FP8 · {seeded.healthy.group}", str(score["step"])]
        assert value == pytest.approx(score["score"], rel=1e-12)
        assert [low, high] == pytest.approx(score["interval"], rel=1e-12)
    step = accuracy[0]["step"]
    chosen = reader.json(f"/runs/{seeded.healthy.pk}/evaluations", step=step)
    assert {score["step"] for score in (*chosen["scores"], *chosen["comparisons"])} == {step}


def test_the_page_of_the_run_has_the_same_verdict(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    for run in (seeded.healthy, seeded.faulty, seeded.baselines[0]):
        verdict = reader.json(f"/runs/{run.pk}/verdict")
        assert verdict["label"] in html(viewer, f"runs/{run.pk}/")
