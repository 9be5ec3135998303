"""The numbers of the views are those of the API, which are those of the pages."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

import numpy as np
import psycopg
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.sql_logins import Login
from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.trained_runs import trained
from django.test import Client
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert, RuleKind
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.pages.hours.usage import usage_of
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.sql_views import history
from fp8scope_dashboard.sql_views.definitions import VIEWS
from fp8scope_dashboard.telemetry import compaction
from fp8scope_dashboard.text.numbers import NON_FINITE


def rows(session: psycopg.Connection, query: str, *values: Any) -> list[dict[str, Any]]:
    with session.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        return cursor.execute(query, values).fetchall()


def read(client: Client, address: str, **query: Any) -> Any:
    answer = client.get(f"/api/v1/{address}", query)
    assert answer.status_code == 200, answer.content
    return answer.json()


def milliseconds(moment: datetime) -> str:
    """A time as the API writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z"


def numbers(values: list[Any]) -> list[float]:
    """Values of JSON as numbers."""
    return [NON_FINITE[value] if isinstance(value, str) else float(value) for value in values]


@pytest.fixture
def client(seeded: Seeded) -> Client:
    return client_with_token(seeded.healthy.project, Scope.READ)


def test_it_works(seeded: Seeded, client: Client, login: Login) -> None:
    """One project for all of these: seeding it takes seconds."""
    session = login()
    check_runs(session, client)
    check_alerts(session, client)
    check_verdicts(seeded, session, client)
    check_scores(seeded, session, client)
    check_titles(seeded, session)
    check_a_run_that_failed(seeded, session, client)
    check_a_deleted_run(seeded, session)


def check_runs(session: psycopg.Connection, client: Client) -> None:
    answered = {run["id"]: run for run in read(client, "runs")["runs"]}
    viewed = {str(row["run_id"]): row for row in rows(session, "SELECT * FROM runs")}
    assert answered.keys() == viewed.keys() and len(viewed) == 5
    for run_id, run in answered.items():
        row = viewed[run_id]
        equal = ("name", "state", "precision", "recipe_name", "baseline", "parent", "seed", "tags")
        for name in (*equal, "total_steps", "last_step"):
            assert row[name] == run[name], name
        assert row["run_group"] == run["group"] and row["project"] == "research"
        expected = numbers([run["loss"]])[0]
        assert row["loss"] == expected or math.isnan(row["loss"]) and math.isnan(expected)
        assert milliseconds(row["created_at"]) == run["created_at"]
        listed = {entry["name"]: entry["last"] for entry in read(client, f"runs/{run_id}/scalars")["scalars"]}
        latest = rows(session, "SELECT name, value FROM latest_values WHERE run_id = %s", run_id)
        assert {row["name"] for row in latest} == listed.keys()
        np.testing.assert_array_equal(
            [row["value"] for row in latest], numbers([listed[row["name"]] for row in latest])
        )


def test_histories_are_the_points_of_charts(login: Login) -> None:
    project = create_project("research", "Research")
    client, short = client_with_token(project, Scope.READ), make_run(project, "short")
    Recorder(run=short).rows(range(300), {"loss": np.where(np.arange(300) > 250, np.inf, 2.0)})
    long = make_run(project, "long", state=RunState.FINISHED)
    values = np.sin(np.arange(5_000) / 50.0)
    values[2_345] = 40.0
    values[4_000] = np.nan
    Recorder(run=long).rows(np.arange(5_000), {"loss": values, "lr": np.cos(values)}, rows_per_batch=500)
    while compaction.compact_run(long.pk):
        pass
    session = login()
    assert history.copy_due() == 2
    for run, name, thinned in ((long, "loss", True), (long, "lr", True), (short, "loss", False)):
        line = read(client, f"runs/{run.pk}/series", scalar=name, points=1_000, times="true")
        points = rows(
            session,
            "SELECT * FROM scalar_history WHERE run_id = %s AND name = %s ORDER BY step",
            run.pk,
            name,
        )
        assert [row["step"] for row in points] == line["steps"] and line["thinned"] is thinned
        np.testing.assert_array_equal([row["value"] for row in points], numbers(line["values"]))
        assert [row["time"].timestamp() for row in points] == [time / 1e6 for time in line["times"]]
        assert {row["thinned"] for row in points} == {thinned}
    assert 40.0 in [
        row["value"]
        for row in rows(
            session, "SELECT value FROM scalar_history WHERE run_id = %s AND name = 'loss'", long.pk
        )
    ]


def test_means_are_those_of_all_values(login: Login) -> None:
    run = make_run(create_project("research", "Research"), "long", state=RunState.FINISHED)
    values = np.random.default_rng(3).normal(size=5_000)
    values[4_000] = np.nan
    Recorder(run=run).rows(np.arange(5_000), {"loss": values}, rows_per_batch=500)
    while compaction.compact_run(run.pk):
        pass
    assert history.copy_run(run.pk)
    query = "SELECT * FROM scalar_means WHERE run_id = %s AND name = 'loss' ORDER BY last_step"
    buckets = rows(login(), query, run.pk)
    assert len(buckets) == 625 and [row["first_step"] for row in buckets] == list(range(0, 5_000, 8))
    assert sum(row["values"] for row in buckets) == 4_999
    for row in buckets:
        part = values[row["first_step"] : row["last_step"] + 1]
        assert row["mean"] == pytest.approx(part.mean(), rel=1e-12, nan_ok=True)
        assert row["last"] == part[-1]


def check_alerts(session: psycopg.Connection, client: Client) -> None:
    answered = {alert["id"]: alert for alert in read(client, "alerts")["alerts"]}
    viewed = {row["alert_id"]: row for row in rows(session, "SELECT * FROM alerts")}
    assert answered.keys() == viewed.keys() and len(viewed) > 2
    for number, alert in answered.items():
        row = viewed[number]
        for name in (
            "kind",
            "title",
            "severity",
            "state",
            "onset_step",
            "step",
            "value",
            "threshold",
            "message",
        ):
            assert row[name] == alert[name], name
        assert str(row["run_id"]) == alert["run"]["id"]
        assert milliseconds(row["opened_at"]) == alert["opened_at"]


def check_titles(seeded: Seeded, session: psycopg.Connection) -> None:
    """Every kind of alert has the title of its rule."""
    for number, kind in enumerate(RuleKind.values):
        Alert.objects.create(
            run=seeded.healthy, kind=kind, severity="warning", onset_step=10_000 + number, step=1, message="x"
        )
    viewed = rows(session, "SELECT kind, title FROM alerts WHERE onset_step >= 10000")
    assert {row["kind"]: row["title"] for row in viewed} == dict(RuleKind.choices)


def check_verdicts(seeded: Seeded, session: psycopg.Connection, client: Client) -> None:
    viewed = {row["run_id"]: row for row in rows(session, "SELECT * FROM verdicts")}
    assert viewed.keys() == {seeded.healthy.pk, seeded.faulty.pk}
    for run_id, row in viewed.items():
        verdict = read(client, f"runs/{run_id}/verdict")
        for name in (
            "verdict",
            "measured",
            "final",
            "unit",
            "delta",
            "tolerance",
            "margin",
            "smallest_detectable",
        ):
            assert row[name] == verdict[name], name
        assert [row["delta_low"], row["delta_high"]] == (verdict["interval"] or [None, None])
        assert row["own_difference"] == verdict["own"] and row["baseline"] == verdict["baseline"]
    assert viewed[seeded.faulty.pk]["verdict"] == "worse"


def check_a_run_that_failed(seeded: Seeded, session: psycopg.Connection, client: Client) -> None:
    """The page says at once that its verdict is not final, and the view after the next comparison."""
    run = seeded.healthy
    Run.objects.filter(pk=run.pk).update(state=RunState.FAILED, total_steps=100_000)
    shown = read(client, f"runs/{run.pk}/verdict")["final"]
    assert shown is False
    compare(run.pk)
    (row,) = rows(session, "SELECT verdict, final FROM verdicts WHERE run_id = %s", run.pk)
    verdict = read(client, f"runs/{run.pk}/verdict")
    assert (row["verdict"], row["final"]) == (verdict["verdict"], verdict["final"]) and not row["final"]


def check_scores(seeded: Seeded, session: psycopg.Connection, client: Client) -> None:
    run = seeded.healthy
    answered = read(client, f"runs/{run.pk}/evaluations")
    viewed = rows(
        session, "SELECT * FROM evaluations WHERE run_id = %s ORDER BY step DESC, name, metric", run.pk
    )
    assert len(viewed) == len(answered["scores"]) == 6
    for row, score in zip(viewed, answered["scores"], strict=True):
        for name in ("name", "metric", "step", "kind", "higher_is_better", "items", "precision"):
            assert row[name] == score[name], name
        assert row["score"] == pytest.approx(score["score"], rel=1e-12)
    judged = {
        (row["name"], row["metric"], row["step"]): row
        for row in rows(session, "SELECT * FROM score_verdicts WHERE run_id = %s", run.pk)
    }
    for comparison in answered["comparisons"]:
        row = judged[comparison["name"], comparison["metric"], comparison["step"]]
        for name in ("verdict", "measured", "baseline_score", "difference", "margin", "items"):
            assert row[name] == comparison[name], name
        assert [row["difference_low"], row["difference_high"]] == (comparison["interval"] or [None, None])
    assert answered["comparisons"]


def test_gpu_hours(login: Login) -> None:
    project = create_project("hours", "Hours")
    project.gpu_hour_price = 2.5
    project.save()
    crashed = trained(project, "crashed", (1, 100, 10.0), (81, 120, 4.0), state=RunState.FAILED)
    trained(project, "next", (91, 200, 7.0), parent=str(crashed.pk), relation="resumed")
    trained(project, "two ranks of eight", (1, 10, 1.0), ranks=2, world_size=8)
    # Another project must change no number of this one.
    trained(
        create_project("other", "Other"), "stranger", (1, 10, 9.0), parent=str(crashed.pk), relation="resumed"
    )
    viewed = {row["run_id"]: row for row in rows(login(project), "SELECT * FROM gpu_hours")}
    expected = {run.id: run for run in usage_of(project).largest}
    assert viewed.keys() == expected.keys() and len(expected) == 3
    for run_id, run in expected.items():
        row = viewed[run_id]
        assert row["hours"] == pytest.approx(run.seconds / 3600, rel=1e-12)
        assert row["diverged_hours"] == pytest.approx(run.diverged / 3600, rel=1e-12)
        assert row["crashed_hours"] == pytest.approx(run.crashed / 3600, rel=1e-12)
        assert row["cost"] == pytest.approx(2.5 * run.seconds / 3600, rel=1e-12)
    assert viewed[crashed.pk]["crashed_hours"] > 0


def check_a_deleted_run(seeded: Seeded, session: psycopg.Connection) -> None:
    """Each view has the run, and none of them once it is deleted."""
    names = [view.name for view in VIEWS if view.name != "projects"]
    read_before = {
        name for name in names if rows(session, f"SELECT 1 FROM {name} WHERE run_id = %s", seeded.faulty.pk)
    }
    assert read_before == set(names)
    Run.objects.filter(pk=seeded.faulty.pk).update(deleted_at=timezone.now())
    assert [
        name for name in names if rows(session, f"SELECT 1 FROM {name} WHERE run_id = %s", seeded.faulty.pk)
    ] == []
