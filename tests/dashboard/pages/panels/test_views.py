"""Panels on the page of a run: what is drawn, and whose view a change changes."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, get_json, run_html, trace_values
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from fp8scope_dashboard.audit.models import Entry
from fp8scope_dashboard.pages import saved_views
from fp8scope_dashboard.pages.panels import saved
from fp8scope_dashboard.pages.panels.panel import MAX_METRICS, MAX_PANELS
from fp8scope_dashboard.runs.models import Run, SavedView

STEPS = 200
RISING = np.arange(STEPS, dtype=float)


@pytest.fixture
def run(admin: Visitor) -> Run:
    """A run without a metric called loss."""
    run = make_run(admin.project, "own names", precision="bf16")
    scalars = {
        "train/nll": 4.0 - RISING / STEPS,
        "eval/nll": 5.0 - RISING / STEPS,
        "train/acc": RISING / STEPS,
    }
    scalars |= {"reward": RISING - 100.0, "tokens": 10.0 * RISING, "time_forward": np.full(STEPS, 0.1)}
    Recorder(run=run).rows(np.arange(STEPS), scalars, rows_per_batch=100)
    return run


def figure(visitor: Visitor, run: Run, **query: Any) -> dict[str, Any]:
    return get_json(visitor, f"runs/{run.pk}/charts/figure.json", **query)


def traces(answer: dict[str, Any]) -> dict[str, Any]:
    """The traces that are drawn strongly, by name."""
    return {
        trace["name"]: trace
        for trace in answer["figure"]["data"]
        if trace.get("yaxis", "y") == "y" and len(trace_values(trace["x"])) > 1 and "raw" not in trace["name"]
    }


def send(visitor: Visitor, run: Run, what: str, **fields: Any) -> Any:
    return visitor.client.post(visitor.address(f"runs/{run.pk}/charts/{what}"), fields)


def view_id(answer: Any) -> int:
    """The view to which a change leads."""
    assert answer.status_code == 302
    return int(parse_qs(urlsplit(answer["Location"]).query)["view"][0])


def test_it_works(viewer: Visitor, run: Run) -> None:
    """Every metric has a chart, in groups, without a loss and without a view."""
    page = run_html(viewer, run, "?tab=charts")
    for name in ("train%2Fnll", "eval%2Fnll", "train%2Facc", "metric=reward", "time_forward"):
        assert f"{name}" in page
    order = [
        page.index(f"<h2>{title}</h2>") for title in ("Metrics", "eval", "train", "Recorded by fp8scope")
    ]
    assert order == sorted(order)


def test_a_panel_of_several_metrics_and_a_formula(viewer: Visitor, run: Run) -> None:
    answer = figure(
        viewer, run, metric=["train/nll", "eval/nll"], formula="eval/nll - train/nll", smoothing="none"
    )
    drawn = traces(answer)
    assert list(drawn) == ["train/nll", "eval/nll", "eval/nll - train/nll"]
    assert trace_values(drawn["eval/nll - train/nll"]["y"]) == pytest.approx(np.ones(STEPS))
    assert len({trace["line"]["color"] for trace in drawn.values()}) == 3


def test_a_formula_has_the_steps_that_its_metrics_share(viewer: Visitor, run: Run) -> None:
    Recorder(run=run, rank=1).rows(np.arange(0, STEPS, 20), {"rare": np.arange(0, STEPS, 20)})
    drawn = traces(figure(viewer, run, formula="rare - reward", smoothing="none"))["rare - reward"]
    assert trace_values(drawn["x"]).tolist() == list(range(0, STEPS, 20))
    assert set(trace_values(drawn["y"])) == {100.0}


def test_a_regular_expression_chooses_metrics(viewer: Visitor, run: Run) -> None:
    assert list(traces(figure(viewer, run, pattern="/nll$", smoothing="none"))) == ["eval/nll", "train/nll"]
    assert "matches no metric" in figure(viewer, run, pattern="nothing")["empty"]
    assert "no regular expression" in figure(viewer, run, pattern="(")["empty"]


@pytest.mark.parametrize(
    ("x", "first", "last"),
    [("step", 0, STEPS - 1), ("tokens", 0, 10 * (STEPS - 1)), ("time", 0, (STEPS - 1) / 600)],
)
def test_axes(viewer: Visitor, run: Run, x: str, first: float, last: float) -> None:
    drawn = trace_values(traces(figure(viewer, run, metric="reward", x=x, smoothing="none"))["reward"]["x"])
    assert (drawn[0], drawn[-1]) == pytest.approx((first, last))


def test_the_time_of_day_is_that_of_the_reader(viewer: Visitor, run: Run) -> None:
    query = {"metric": "reward", "x": "wall", "smoothing": "none"}
    utc = figure(viewer, run, **query)
    assert utc["figure"]["layout"]["xaxis"]["type"] == "date"
    begin = np.datetime64("2026-01-01T00:00:00", "ms").astype(float)
    assert trace_values(traces(utc)["reward"]["x"])[0] == begin
    viewer.client.post(reverse("account_time_zone"), {"time_zone": "Asia/Tokyo"})
    local = trace_values(traces(figure(viewer, run, **query))["reward"]["x"])
    assert local[0] == begin + 9 * 3_600_000
    zoomed = figure(viewer, run, **query, **{"from": f"{local[50]}", "to": f"{local[60]}"})
    x = trace_values(traces(zoomed)["reward"]["x"])
    assert local[49] <= x[0] <= local[50] and local[60] <= x[-1] <= local[61]


def test_smoothing_has_a_strength(viewer: Visitor, run: Run) -> None:
    run_noise = {"noise": np.random.default_rng(0).normal(size=STEPS)}
    Recorder(run=run, rank=1).rows(np.arange(STEPS), run_noise)

    def spread(**query: str) -> float:
        return float(np.std(trace_values(traces(figure(viewer, run, metric="noise", **query))["noise"]["y"])))

    weak, strong = (spread(smoothing="exponential", strength=weight) for weight in ("0.5", "0.97"))
    assert spread(smoothing="none") > weak > 2 * strong
    assert spread(smoothing="window", strength="3") > 2 * spread(smoothing="window", strength="51")


def test_range_and_logarithm(viewer: Visitor, run: Run) -> None:
    layout = figure(viewer, run, metric="reward", low="-5", high="7")["figure"]["layout"]
    assert layout["yaxis"]["range"] == [-5, 7]
    layout = figure(viewer, run, metric="tokens", log="1", low="10", high="1000")["figure"]["layout"]
    assert layout["yaxis"]["type"] == "log" and layout["yaxis"]["range"] == [1, 3]


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"metric": [f"m{number}" for number in range(MAX_METRICS + 1)]},
        {"metric": "x" * 600},
        {"formula": "a +"},
        {"pattern": "x" * 201},
        {"metric": "reward", "low": "nan"},
        {"metric": "reward", "low": "2", "high": "1"},
        {"metric": "reward", "smoothing": "exponential", "strength": "1"},
        {"metric": "reward", "smoothing": "window", "strength": "1e9"},
        {"formula": "1 + 2"},
        {"formula": "missing - reward"},
    ],
)
def test_what_cannot_be_drawn_says_why(viewer: Visitor, run: Run, query: dict[str, Any]) -> None:
    assert figure(viewer, run, **query)["empty"]


def test_the_first_change_makes_an_own_view(viewer: Visitor, run: Run) -> None:
    made = view_id(send(viewer, run, "change", metric="reward", action="pin", height="medium"))
    view = SavedView.objects.get(pk=made)
    assert (view.owner, view.name, view.shared) == (viewer.user, saved.OWN_NAME, False)
    assert [(panel["metrics"], panel["is_pinned"]) for panel in view.panels] == [(["reward"], True)]
    # Of another run of the project, and without the view in the address: the same view tomorrow.
    other = make_run(viewer.project, "other")
    assert 'id="charts-pinned"' in run_html(viewer, other, "?tab=charts")


def test_panels_are_changed_moved_sized_and_removed(viewer: Visitor, run: Run) -> None:
    for metric in ("reward", "train/acc", "eval/nll"):
        made = view_id(send(viewer, run, "panel/save", metric=metric, x="tokens"))
    view = SavedView.objects.get(pk=made)
    ids = {panel["metrics"][0]: panel["id"] for panel in view.panels}

    def after(**fields: str) -> list[dict[str, Any]]:
        assert view_id(send(viewer, run, "change", view=made, **fields)) == made
        view.refresh_from_db()
        return list(view.panels)

    def order(panels: list[dict[str, Any]]) -> list[str]:
        return [panel["metrics"][0] for panel in panels]

    assert order(after(panel=ids["eval/nll"], action="move", to="0")) == ["eval/nll", "reward", "train/acc"]
    assert order(after(panel=ids["eval/nll"], action="later")) == ["reward", "eval/nll", "train/acc"]
    assert order(after(panel=ids["reward"], action="earlier")) == ["reward", "eval/nll", "train/acc"]
    sized = after(panel=ids["reward"], action="size", width="2", height="large")
    assert (sized[0]["width"], sized[0]["height"], sized[0]["x"]) == (2, "large", "tokens")
    assert after(panel=ids["reward"], action="size", width="99", height="vast")[0]["width"] == 3
    assert order(after(panel=ids["reward"], action="remove")) == ["eval/nll", "train/acc"]
    send(viewer, run, "panel/save", view=made, panel=ids["eval/nll"], formula="reward * 2", log="1")
    view.refresh_from_db()
    assert (view.panels[0]["formula"], view.panels[0]["log"], view.panels[0]["id"]) == (
        "reward * 2",
        True,
        ids["eval/nll"],
    )
    # Removed in another window.
    assert send(viewer, run, "change", view=made, panel=ids["reward"], action="pin").status_code == 302
    assert "no longer in the view" in run_html(viewer, run, "?tab=charts")


def test_a_mistake_shows_the_form_again(viewer: Visitor, run: Run) -> None:
    answer = send(viewer, run, "panel/save", title="Mine", formula="(reward", low="x", x="tokens")
    page = answer.content.decode()
    assert answer.status_code == 200 and "closing bracket" in page
    for field in ('value="Mine"', 'value="(reward"', 'name="low" value="x"', 'value="tokens" selected'):
        assert field in page
    assert not SavedView.objects.exists()


def test_views_of_others_are_copied_not_changed(member: Visitor, viewer: Visitor, run: Run) -> None:
    send(member, run, "panel/save", metric="reward", title="Ours")
    answer = send(member, run, "views/save", name="Team", shared="1")
    shared = view_id(answer)
    assert ">Ours<" in run_html(viewer, run, f"?tab=charts&view={shared}"), "a link shows a shared view"
    copy = view_id(send(viewer, run, "change", view=shared, metric="train/acc", action="pin"))
    assert copy != shared
    assert len(SavedView.objects.get(pk=copy).panels) == 2
    assert len(SavedView.objects.get(pk=shared).panels) == 1


def test_a_private_view_is_not_shown_to_others(member: Visitor, viewer: Visitor, run: Run) -> None:
    private = view_id(send(member, run, "panel/save", metric="reward", title="Secret"))
    page = run_html(viewer, run, f"?tab=charts&view={private}")
    assert ">Secret<" not in page and "not shared with you" in page
    send(viewer, run, "change", view=private, metric="reward", action="pin")
    assert [panel["title"] for panel in SavedView.objects.get(owner=viewer.user).panels] == [""]
    assert send(viewer, run, "views/save", name="x", shared="1").status_code == 403


def test_the_default_of_the_project(admin: Visitor, viewer: Visitor, run: Run) -> None:
    send(admin, run, "panel/save", metric="reward", title="Ours")
    view = SavedView.objects.get()
    assert ">Ours<" not in run_html(viewer, run, "?tab=charts")
    send(admin, run, f"views/{view.pk}/default", default="1")
    assert ">Ours<" in run_html(viewer, run, "?tab=charts")
    assert Entry.objects.get().text == "“My charts” is now the project’s default view of charts"
    send(admin, run, "panel/save", metric="train/acc")
    second = view_id(send(admin, run, "views/save", name="Other"))
    send(admin, run, f"views/{second}/default", default="1")
    assert SavedView.objects.get(is_default=True).pk == second
    send(admin, run, f"views/{second}/default", default="0")
    assert not SavedView.objects.filter(is_default=True).exists()


def test_a_view_gets_another_name(viewer: Visitor, run: Run) -> None:
    made = view_id(send(viewer, run, "panel/save", metric="reward"))
    assert view_id(send(viewer, run, "views/save", view=made, name="Rewards", how="rename")) == made
    assert SavedView.objects.get().name == "Rewards"
    assert send(viewer, run, "views/save", view=made, name=" ").status_code == 302
    assert "Give the view a name" in run_html(viewer, run, "?tab=charts")


def test_bounds(viewer: Visitor, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = {"id": "p", "metrics": ["reward"]}
    view = SavedView.objects.create(
        project=viewer.project, owner=viewer.user, name="full", page="charts", panels=[panel] * MAX_PANELS
    )
    answer = send(viewer, run, "panel/save", view=view.pk, metric="reward")
    assert answer.status_code == 200 and f"at most {MAX_PANELS} panels" in answer.content.decode()
    monkeypatch.setattr(saved_views, "MAX_VIEWS", 1)
    send(viewer, run, "views/save", view=view.pk, name="second")
    assert "delete one first" in run_html(viewer, run, "?tab=charts")
    assert SavedView.objects.get().pk == view.pk


def test_views_of_charts_are_no_views_of_the_list(viewer: Visitor, run: Run) -> None:
    made = view_id(send(viewer, run, "panel/save", metric="reward"))
    assert saved.OWN_NAME not in viewer.client.get(viewer.address()).content.decode()
    assert viewer.client.post(viewer.address(f"views/{made}/delete")).status_code == 404
    assert send(viewer, run, f"views/{made}/delete").status_code == 302
    assert not SavedView.objects.exists()


def test_finding_metrics(viewer: Visitor, run: Run) -> None:
    page = run_html(viewer, run, "?tab=charts&find=^train/")
    assert "train%2Facc" in page and "eval%2Fnll" not in page
    page = run_html(viewer, run, "?tab=charts&find=nothing")
    assert "No chart matches" in page
    page = run_html(viewer, run, "?tab=charts&find=acc(")
    assert "no regular expression" in page


def test_a_part_for_htmx_has_the_address_of_the_view(viewer: Visitor, run: Run) -> None:
    path = viewer.address(f"runs/{run.pk}/charts/change")
    answer = viewer.client.post(path, {"metric": "reward", "action": "pin"}, headers={"HX-Request": "true"})
    view = SavedView.objects.get()
    assert (
        answer["HX-Push-Url"].endswith(f"?tab=charts&view={view.pk}") and answer["HX-Retarget"] == "#charts"
    )
    assert answer.content.decode().lstrip().startswith('<div id="charts"')


def test_a_group_with_many_metrics_shows_the_first(viewer: Visitor) -> None:
    run = make_run(viewer.project, "many", last_scalars={f"layer/{number:03}": 1.0 for number in range(300)})
    page = run_html(viewer, run, "?tab=charts")
    assert page.count("<article") == 24 and "276 more" in page
    assert run_html(viewer, run, "?tab=charts&group=layer").count("<article") == 300


def test_the_number_of_queries_does_not_depend_on_panels_and_views(viewer: Visitor, run: Run) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            run_html(viewer, run, "?tab=charts")
        return len(captured)

    send(viewer, run, "panel/save", metric="reward")
    queries()
    few = queries()
    for number in range(5):
        send(viewer, run, "panel/save", metric="reward")
        send(viewer, run, "views/save", name=f"view {number}")
    assert queries() <= few
