"""The hours of a project: what they add up to, what was lost and saved, and what the page says of it."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.trained_runs import BEGAN, trained
from dashboard.helpers.visitors import Visitor, html
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.fleet.content import Fleet, fleet_of
from fp8scope_dashboard.pages.fleet.measured import savings_of, waiting_in
from fp8scope_dashboard.pages.hours.usage import usage_of
from fp8scope_dashboard.pages.hours.wording import hours, price_of
from fp8scope_dashboard.runs.models import Artefact, Run, RunState, Writer

HOUR = 3_600.0


def diverged(run: Run, onset: int, resolved: int | None = None, kind: str = "loss_divergence") -> None:
    Alert.objects.create(
        run=run,
        kind=kind,
        severity="critical",
        onset_step=onset,
        step=min(onset + 5, 2**63 - 1),
        resolved_step=resolved,
    )


def only(project: Project) -> tuple[float, float, float]:
    """Hours of the only run of a project: all, after a divergence, and lost to crashes."""
    (row,) = usage_of(project).precisions
    return tuple(round(seconds / HOUR, 6) for seconds in (row.seconds, row.diverged, row.crashed))  # type: ignore[return-value]


def test_it_works(viewer: Visitor) -> None:
    trained(viewer.project, "bf16", (1, 1_000, 10.0), ranks=4, precision="bf16")
    run = trained(viewer.project, "fp8", (1, 1_000, 8.0), ranks=4, precision="fp8", state=RunState.FAILED)
    diverged(run, 901)
    Comparison.objects.create(
        run=run, baseline="bf16", to_step=1, verdict="worse",
        result={"quantities": {"net": {"ratio": 1.25, "interval": [1.2, 1.3]}}},
    )  # fmt: skip
    page = html(viewer, "fleet/?price=2.5")
    assert "2 runs took 72.0 GPU hours, 44.4\u202f% in FP8; 32.0 (44.4\u202f%) were lost." in page
    assert "FP8 saved 8.0 hours (6.4 to 9.6) against BF16." in page
    # The divergence took a tenth; the rest of the failed start is lost, because no checkpoint is known.
    assert "1 run ended without a known checkpoint" in page
    assert ">180.00<" in page and ">80.00<" in page and "Runs with the most hours" in page
    assert "diverged and crashed" in page and "No run sends time_data" in page
    answer = viewer.client.get(viewer.address("fleet/fleet.json"), {"price": "2.5"}).json()
    assert (answer["hours"], answer["cost"], answer["saved"]["interval"]) == (72.0, 180.0, [6.4, 9.6])
    assert answer["lost"] == {
        "divergences": 3.2, "crashes": 28.8, "waiting": None, "waiting_measured_hours": 0.0
    }  # fmt: skip
    assert 'href="/p/research/fleet/" aria-current="page"' in page


@pytest.mark.parametrize(
    ("attempts", "state", "lost"),
    [
        ([(1, 100, 10.0)], RunState.FINISHED, 0.0),
        ([(1, 100, 10.0)], RunState.RUNNING, 0.0),
        ([(1, 100, 10.0)], RunState.SILENT, 10.0),
        # Steps 81 to 100 are trained twice: 20 of 140 in 14 hours.
        ([(1, 100, 10.0), (81, 120, 4.0)], RunState.FINISHED, 2.0),
        ([(1, 100, 10.0), (101, 140, 4.0)], RunState.FINISHED, 0.0),
        # Then the second start is lost as well, without the steps that the first lost.
        ([(1, 100, 10.0), (81, 120, 4.0)], RunState.FAILED, 4.0),
    ],
)
def test_crashes(project: Project, attempts: Any, state: RunState, lost: float) -> None:
    trained(project, "run", *attempts, state=state)
    assert only(project) == (sum(hours for _, _, hours in attempts), 0.0, lost)


def test_what_followed_a_checkpoint_is_lost(project: Project) -> None:
    run = trained(project, "run", (1, 100, 10.0), state=RunState.FAILED)
    for step, name in ((50, "a"), (90, "b"), (None, "log")):
        Artefact.objects.create(run=run, name=name, address=f"s3://b/{name}", step=step)
    assert only(project) == (10.0, 0.0, 1.0) and usage_of(project).precisions[0].guesses == 0


def test_a_run_that_another_resumed_lost_what_that_one_trains_again(project: Project) -> None:
    run = trained(project, "run", (1, 100, 10.0), state=RunState.FAILED)
    trained(project, "next", (71, 200, 13.0), parent=str(run.pk), relation="resumed")
    assert only(project) == (23.0, 0.0, 3.0)


@pytest.mark.parametrize(
    ("alerts", "lost"),
    [
        ([(61, None)], 4.0),
        ([(61, 80)], 2.0),
        ([(61, 80), (71, 90)], 3.0),
        ([(11, 20), (91, None)], 2.0),
        ([(2**63 - 1, None)], 0.0),
        ([(-5, 2**63 - 1)], 10.0),
    ],
)
def test_divergences(project: Project, alerts: list[tuple[int, int | None]], lost: float) -> None:
    run = trained(project, "run", (1, 100, 10.0))
    for onset, resolved in alerts:
        diverged(run, onset, resolved)
    assert only(project) == (10.0, lost, 0.0)


def test_only_alerts_of_a_broken_loss_are_divergences(project: Project) -> None:
    run = trained(project, "run", (1, 100, 10.0))
    diverged(run, 1, kind="loss_spike")
    Alert.objects.create(run=run, kind="above_baseline", severity="warning", onset_step=1, step=1)
    assert only(project)[1] == 0.0
    Alert.objects.create(run=run, kind="above_baseline", severity="critical", onset_step=51, step=60)
    assert only(project)[1] == 5.0


def test_processes(project: Project) -> None:
    run = trained(project, "one rank of eight writes", (1, 100, 1.0), world_size=8)
    assert only(project)[0] == 8.0
    Run.objects.filter(pk=run.pk).update(environment=["no object"])
    assert only(project)[0] == 1.0
    Run.objects.filter(pk=run.pk).update(environment={"world_size": "1e999"})
    assert only(project)[0] == 1.0
    # Sent after the training by fp8scope sync: the run began and ended before its data came.
    Writer.objects.filter(run=run).update(
        created_at=BEGAN + timedelta(hours=30), finished_at=BEGAN + timedelta(hours=2)
    )
    assert only(project)[0] == 2.0
    # Imported without an end: the time at which it was imported says nothing.
    Writer.objects.filter(run=run).update(finished_at=None, imported=True)
    assert only(project)[0] == 0.0 and usage_of(project).precisions[0].untimed == 1


def test_steps_of_any_size_are_added_up(project: Project) -> None:
    run = trained(project, "run", (0, 2**63 - 1, 10.0), (5, 2**63 - 1, 1.0), state=RunState.FAILED)
    diverged(run, 2**62)
    seconds, after, crashed = only(project)
    assert seconds == 11.0 and 0.0 < after + crashed <= 11.0


def test_runs_of_other_projects_and_deleted_ones_do_not_count(project: Project) -> None:
    trained(create_project("other", "Other"), "theirs", (1, 100, 10.0))
    trained(project, "deleted", (1, 100, 10.0), deleted_at=timezone.now())
    assert usage_of(project).precisions == []
    trained(project, "archived", (1, 100, 10.0), archived_at=timezone.now())
    assert only(project)[0] == 10.0


def test_waiting_is_measured_in_the_series(project: Project) -> None:
    run = trained(project, "run", (1, 200, 10.0))
    seconds = np.ones(200)
    Recorder(run=run).rows(
        np.arange(1, 201), {"time_data": np.where(np.arange(200) < 100, 0.1, 0.3), "step_seconds": seconds}
    )
    trained(project, "sends no time", (1, 100, 30.0))
    run.refresh_from_db()
    Writer.objects.filter(run=run, first_step=None).delete()
    usage = usage_of(project)
    hours_of_run = next(row for row in usage.largest if row.name == "run").seconds
    waiting = waiting_in(usage.largest)
    assert waiting.seconds == pytest.approx(0.2 * hours_of_run) and waiting.runs == 1
    assert (waiting.measured, waiting.read) == (hours_of_run, sum(row.seconds for row in usage.largest))


def test_savings_use_the_net_speed_or_the_throughput(project: Project) -> None:
    quantities = [
        {"net": {"ratio": 1.5, "interval": [1.4, 1.6]}, "throughput": {"ratio": 9.0, "interval": None}},
        {"net": None, "throughput": {"ratio": 0.8, "interval": None}},
        {"net": {"ratio": 4.0, "interval": [0.1, 100.0]}, "throughput": {"ratio": None, "interval": None}},
        {"headline": ""},
    ]
    for number, entry in enumerate(quantities):
        run = trained(project, f"run {number}", (1, 100, 10.0), precision="fp8")
        Comparison.objects.create(
            run=run, baseline="bf16", to_step=1, verdict="equivalent", result={"quantities": entry}
        )
    savings = savings_of(usage_of(project).largest)
    assert savings.seconds / HOUR == pytest.approx(5.0 - 2.0)
    assert (savings.low / HOUR, savings.high / HOUR) == pytest.approx((4.0 - 2.0, 6.0 - 2.0))
    assert savings.runs == 2 and savings.measured / HOUR == pytest.approx(20.0)
    fleet = Fleet(usage_of(project), waiting_in([]), savings)
    assert "FP8 saved 3.0 hours (2.0 to 4.0) against BF16." in fleet.answer
    Comparison.objects.filter(run__name="run 0").delete()
    assert "FP8 took 2.0 hours more (2.0 to 2.0) than BF16 would have." in fleet_of(project).answer


def test_the_number_of_queries_does_not_grow_with_the_runs(viewer: Visitor) -> None:
    def queries() -> int:
        with CaptureQueriesContext(
            connection,
        ) as captured:
            html(viewer, "fleet/")
        return len(captured)

    trained(viewer.project, "run 0", (1, 100, 10.0), precision="fp8")
    before = queries()
    for number in range(1, 12):
        run = trained(viewer.project, f"run {number}", (1, 100, 10.0), (50, 90, 1.0), precision="fp8")
        diverged(run, 60)
    assert queries() == before


def test_a_project_without_hours(viewer: Visitor) -> None:
    assert "No hours yet" in html(viewer, "fleet/")
    make_run(viewer.project, "registered only")
    assert "No hours yet" in html(viewer, "fleet/")
    answer = viewer.client.get(viewer.address("fleet/fleet.json")).json()
    assert answer["hours"] == 0 and answer["saved"]["hours"] is None
    json.dumps(answer, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("2.50", 2.5),
        (" 2,5 ", 2.5),
        ("0", None),
        ("-1", None),
        ("nan", None),
        ("1e9", None),
        ("x", None),
        ("", None),
    ],
)
def test_prices_have_bounds(text: str, price: float | None) -> None:
    assert price_of(text) == price


def test_a_wrong_price_is_said(viewer: Visitor) -> None:
    trained(viewer.project, "run", (1, 100, 10.0))
    page = html(viewer, "fleet/?price=%3Cb%3E")
    assert "“&lt;b&gt;” is no price" in page and "Cost" not in page


def test_hours_in_words() -> None:
    assert [hours(HOUR * amount) for amount in (0.0, 0.0123, 1.0, 41.0, 4_120.4, -3.2, 1e-9, -4e-4)] == [
        "0.0", "0.012", "1.0", "41.0", "4\u202f120", "−3.2", "< 0.01", "> −0.01"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hours_of_each", "sentence"),
    [
        (10.0, "Whether FP8 saved hours cannot be told: −0.5 to 0.5."),
        (0.1, "FP8 saved or cost less than 0.01 hours."),
    ],
)
def test_an_interval_around_no_saving(viewer: Visitor, hours_of_each: float, sentence: str) -> None:
    trained(viewer.project, "bf16", (1, 100, hours_of_each), precision="bf16")
    run = trained(viewer.project, "fp8", (1, 100, hours_of_each), precision="fp8")
    Comparison.objects.create(
        run=run, baseline="bf16", to_step=1, verdict="equivalent",
        result={"quantities": {"net": {"ratio": 1.0, "interval": [0.95, 1.05]}}},
    )  # fmt: skip
    assert sentence in html(viewer, "fleet/")
