"""The evaluations page: scores with their intervals, and verdicts."""

from __future__ import annotations

from typing import Any

from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.utils.html import escape

from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations


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
    assert escape(row.result["explanation"]) in page


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
    assert needs is None or f"{needs['items']:,} items" in table or f"{needs['seeds']} seeds" in table


def test_warns_of_other_precisions(admin: Visitor) -> None:
    for name, fields, precision in (
        ("bf16", {"precision": "bf16", "group": "bf16"}, "bf16"),
        ("fp8", {"precision": "fp8", "baseline": "bf16"}, "fp16"),
    ):
        run = make_run(admin.project, name, **fields)
        Recorder(run).evaluation(10, [1.0, 0.0] * 5, precision=precision)
        compare_evaluations(run.id)
    page = html(admin)
    assert "values above 65,504 overflow there" in page and "the baseline in BF16" in page


def test_the_chart_shows_every_run_and_the_baseline_band(admin: Visitor, seeded: Seeded) -> None:
    answer = scores(admin)
    assert len(answer["figure"]["data"]) == 5
    assert len(answer["figure"]["layout"]["shapes"]) == 1
    assert "gpt fp8 frozen scale" in answer["summary"]


def test_empty_states(admin: Visitor) -> None:
    assert "run.log_eval(" in html(admin)
    assert "empty" in scores(admin)


def test_scores_without_a_baseline_have_no_verdict(admin: Visitor) -> None:
    Recorder(make_run(admin.project, "r")).evaluation(10, [1.0, 0.0, 1.0])
    assert "No verdict yet" in html(admin)
    (drawn,) = scores(admin)["figure"]["data"]
    assert drawn["error_y"]["array"] != [0.0]


def test_a_single_item_has_no_interval_and_nan_is_not_drawn(admin: Visitor) -> None:
    single, broken = Recorder(make_run(admin.project, "one")), Recorder(make_run(admin.project, "broken"))
    single.evaluation(10, [2.5], metric="nll", kind="mean")
    broken.evaluation(10, [2.5, float("nan")], metric="nll", kind="mean")
    (drawn,) = scores(admin, metric="nll")["figure"]["data"]
    assert drawn["customdata"] == [[10, None, None]]


def test_escapes_names(admin: Visitor) -> None:
    Recorder(make_run(admin.project, "r")).evaluation(1, [1.0, 0.0], name='<img src="x">', metric="a&b")
    page = html(admin)
    assert '<img src="x"' not in page
    assert "%3Cimg%20src%3D%22x%22%3E&amp;metric=a%26b" in page
    assert "figure" in scores(admin, '<img src="x">', "a&b")


def test_a_refresh_gets_only_the_tasks(admin: Visitor, seeded: Seeded) -> None:
    part = html(admin, **{"HX-Target": "tasks"})
    assert part.strip().startswith('<div id="tasks"') and "<html" not in part
    assert 'id="verdicts-1"' in part and 'id="verdicts-2"' in part
