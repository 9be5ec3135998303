"""The evaluations page: scores with their intervals, and verdicts."""

from __future__ import annotations

from typing import Any

from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.utils.html import escape

from fp8scope_dashboard.analysis.models import EvaluationComparison


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
    assert verdicts == {"accuracy": "below", "nll": "above"}
    page = html(admin)
    assert page.count("badge--danger") >= 2
    assert "Below BF16" in page and "Above BF16" in page


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
