"""The evaluations page: scores with their intervals, and verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.utils.html import escape

from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations
from fp8scope_dashboard.analysis.scores.agreement import Agreement, agreement
from fp8scope_dashboard.analysis.scores.result import RunScore
from fp8scope_dashboard.pages.formatting import count, written
from fp8scope_dashboard.pages.scores.forest import positions


def html(visitor: Visitor, **headers: str) -> str:
    answer = visitor.client.get(visitor.address("evaluations/"), headers=headers)
    assert answer.status_code == 200
    return answer.content.decode()


def scores(visitor: Visitor, name: str = "heldout", metric: str = "accuracy") -> dict[str, Any]:
    query = {"name": name, "metric": metric}
    return dict(visitor.client.get(visitor.address("evaluations/scores.json"), query).json())


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin)
    assert page.count("data-figure=") == 2
    assert "lower is better" in page and "higher is better" in page
    row = EvaluationComparison.objects.get(run=seeded.healthy, metric="accuracy", step=100)
    assert escape(written(row.result["explanation"])) in page


def test_verdicts_respect_the_direction_of_the_metric(admin: Visitor, seeded: Seeded) -> None:
    verdicts = dict(EvaluationComparison.objects.filter(run=seeded.faulty).values_list("metric", "verdict"))
    assert verdicts == {"accuracy": "worse", "nll": "worse"}
    page = html(admin)
    assert page.count("badge--danger") >= 3
    assert "Worse than BF16" in page and "Below BF16" not in page


def test_one_sentence_covers_all_tasks(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin)
    assert page.index("Over all tasks") < page.index("data-figure=")
    assert "Worse than BF16 on 2 of 2 tasks: heldout accuracy, heldout nll." in page


def test_a_table_says_what_the_evaluations_can_show(admin: Visitor, seeded: Seeded) -> None:
    table = html(admin).split('id="power"')[1]
    assert "Signal to noise" in table and "Monotonicity" in table
    steps = EvaluationComparison.objects.filter(run=seeded.healthy, metric="accuracy").order_by("-step")
    needs = steps[0].result["needs"]
    assert needs is None or f"{count(needs['items'])} items" in table or f"{needs['seeds']} seeds" in table


def test_warns_of_other_precisions(admin: Visitor) -> None:
    for name, fields, precision in (
        ("bf16", {"precision": "bf16", "group": "bf16"}, "bf16"),
        ("fp8", {"precision": "fp8", "baseline": "bf16"}, "fp16"),
    ):
        run = make_run(admin.project, name, **fields)
        Recorder(run=run).evaluation(10, [1.0, 0.0] * 5, precision=precision)
        compare_evaluations(run.id)
    page = html(admin)
    assert "values above 65\u202f504 overflow there" in page and "the baseline in BF16" in page


def test_the_chart_shows_every_run_and_the_baseline_band(admin: Visitor, seeded: Seeded) -> None:
    answer = scores(admin)
    assert len(answer["figure"]["data"]) == 5
    assert len(answer["figure"]["layout"]["shapes"]) == 1
    assert "gpt fp8 frozen scale" in answer["summary"]


def test_empty_states(admin: Visitor) -> None:
    assert "run.log_eval(" in html(admin)
    assert "empty" in scores(admin)


def test_scores_without_a_baseline_have_no_verdict(admin: Visitor) -> None:
    Recorder(run=make_run(admin.project, "r")).evaluation(10, [1.0, 0.0, 1.0])
    assert "No verdict yet" in html(admin)
    (drawn,) = scores(admin)["figure"]["data"]
    assert drawn["error_y"]["array"] != [0.0]


def test_a_single_item_has_no_interval_and_nan_is_not_drawn(admin: Visitor) -> None:
    single, broken = (
        Recorder(run=make_run(admin.project, "one")),
        Recorder(run=make_run(admin.project, "broken")),
    )
    single.evaluation(10, [2.5], metric="nll", kind="mean")
    broken.evaluation(10, [2.5, float("nan")], metric="nll", kind="mean")
    (drawn,) = scores(admin, metric="nll")["figure"]["data"]
    assert drawn["customdata"] == [[10, None, None]]


def test_escapes_names(admin: Visitor) -> None:
    Recorder(run=make_run(admin.project, "r")).evaluation(1, [1.0, 0.0], name='<img src="x">', metric="a&b")
    page = html(admin)
    assert '<img src="x"' not in page
    assert "%3Cimg%20src%3D%22x%22%3E&amp;metric=a%26b" in page
    assert "figure" in scores(admin, '<img src="x">', "a&b")


def test_a_refresh_gets_only_the_tasks(admin: Visitor, seeded: Seeded) -> None:
    part = html(admin, **{"HX-Target": "tasks"})
    assert part.strip().startswith('<div id="tasks"') and "<html" not in part
    assert 'id="verdicts"' in part and 'id="forest"' in part


def rows(page: str) -> list[str]:
    """The rows of the forest plot."""
    table = page.split('id="forest"')[1].split("</section>")[0]
    return table.split("<tr")[2:]


def test_the_forest_plot_has_a_row_for_each_task_and_run(admin: Visitor, seeded: Seeded) -> None:
    shown = rows(html(admin))
    assert len(shown) == 4
    assert "Worse than BF16" in shown[0] and "Worse than BF16" in shown[1], "the worst come first"
    assert all("forest__zone" in row for row in shown)


def test_searches_and_filters(admin: Visitor, seeded: Seeded) -> None:
    def found(query: str) -> list[str]:
        return rows(admin.client.get(admin.address(f"evaluations/?{query}")).content.decode() + "</section>")

    assert len(found("q=nll")) == 2 and len(found("q=nll+frozen")) == 1
    assert len(found("verdict=worse")) == 2
    assert len(found(f"run={seeded.healthy.pk}")) == 2
    assert "No task matches" in admin.client.get(admin.address("evaluations/?q=nothing")).content.decode()
    for query in ("run=x", "step=-1", "verdict=x", "sort=x", "task=x", "step=99999999999999999999"):
        assert len(found(query)) == 4, "what is not known does not restrict"


def test_shows_the_chosen_task(admin: Visitor, seeded: Seeded) -> None:
    page = admin.client.get(admin.address("evaluations/?task=heldout&metric=nll")).content.decode()
    task = page.split('id="task"')[1]
    assert "lower is better" in task and "median difference" in task
    assert "All checkpoints" in task


def test_many_tasks(admin: Visitor) -> None:
    for name, fields in (("bf16", {"group": "bf16"}), ("fp8", {"baseline": "bf16"})):
        run = make_run(admin.project, name, precision=name, **fields)
        recorder = Recorder(run=run)
        for task in range(100):
            recorder.evaluation(10, [1.0, 0.0] * 4, name=f"task {task:03}")
        compare_evaluations(run.id)
    assert len(rows(html(admin))) == 100


def test_paired_differences(admin: Visitor, seeded: Seeded) -> None:
    query = {"name": "heldout", "metric": "nll"}
    answer = admin.client.get(admin.address("evaluations/differences.json"), query).json()
    healthy, faulty = answer["figure"]["data"]
    row = EvaluationComparison.objects.get(run=seeded.faulty, metric="nll", step=100)
    assert faulty["y"] == [row.result["difference"]]
    zone = answer["figure"]["layout"]["shapes"][0]
    assert zone["y1"] == row.result["margin"] == -zone["y0"]


def test_positions_are_in_margins_with_better_at_the_right() -> None:
    drawn = positions(-0.01, (-0.02, 0.0), 0.01, 0.015, higher_is_better=True)
    assert drawn is not None and drawn.point < 50.0 and drawn.high == 50.0 and drawn.detectable == 25.0
    lower = positions(-0.01, (-0.02, 0.0), 0.01, None, higher_is_better=False)
    assert lower is not None and lower.point > 50.0 and lower.low == 50.0
    beyond = positions(1.0, (0.9, 1.1), 0.01, 5.0, higher_is_better=False)
    assert beyond is not None and (beyond.off_scale, beyond.detectable) == (-1, None)
    assert positions(0.1, (0.0, 0.2), 0.0, None, higher_is_better=True) is None


def test_agreement_pairs_by_name_and_else_by_position() -> None:
    a = RunScore(np.array([1.0, 0.0, 1.0]), ["x", "y", "z"])
    b = RunScore(np.array([0.0, 0.0, 1.0]), ["z", "y", "x"])
    assert agreement(a, b) == Agreement(3, 1, 0, 0.0)
    assert agreement(RunScore(a.items), RunScore(b.items)) == Agreement(3, 1, 0, 0.0)
    assert agreement(RunScore(a.items), RunScore(np.zeros(2))) is None
    assert agreement(a, RunScore(b.items, ["p", "q", "r"])) is None
    assert agreement(RunScore(np.full(3, np.nan)), RunScore(b.items)) is None
