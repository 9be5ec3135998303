"""Alerts over HTTP are those of their page, with its filters."""

from __future__ import annotations

from datetime import timedelta

import pytest
from dashboard.helpers.reading import Reader
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html
from django.utils import timezone

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert


def test_it_works(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    answer = reader.json("/alerts", state="open")
    page = html(viewer, "alerts/?state=open")
    assert answer["total"] == len(answer["alerts"]) > 0
    for alert in answer["alerts"]:
        assert alert["message"][:30] in page.replace("&#x27;", "'")
        assert alert["run"]["name"] == seeded.faulty.name
        assert (
            viewer.client.get(alert["url"].partition("://")[2].partition("/")[2].join(["/", ""])).status_code
            == 200
        )


@pytest.fixture
def many(viewer: Visitor) -> list[Alert]:
    run, other = make_run(viewer.project, "run"), make_run(viewer.project, "other")
    now = timezone.now()
    return [
        Alert.objects.create(
            run=other if i % 3 == 0 else run,
            kind="loss_spike" if i % 2 else "loss_nan",
            severity="critical" if i % 2 else "warning",
            state=("open", "acknowledged", "muted", "resolved")[i % 4],
            onset_step=i,
            step=i + 2,
            message=f"alert {i}",
            # Pairs of alerts have one time.
            opened_at=now - timedelta(minutes=i // 2),
        )
        for i in range(24)
    ]


def test_pages_have_every_alert_once(reader: Reader, many: list[Alert]) -> None:
    expected = [alert.pk for alert in Alert.objects.order_by("-opened_at", "-id")]
    for limit in (1, 5, 100):
        ids, after = [], None
        while True:
            answer = reader.json("/alerts", limit=limit, **({} if after is None else {"after": after}))
            ids += [alert["id"] for alert in answer["alerts"]]
            after = answer["next"]
            if after is None:
                break
        assert ids == expected


@pytest.mark.parametrize("state", ["open", "acknowledged", "muted", "resolved", "all"])
@pytest.mark.parametrize("severity", ["", "critical"])
def test_filters(reader: Reader, many: list[Alert], state: str, severity: str) -> None:
    for kind in ("", "loss_spike"):
        answer = reader.json("/alerts", state=state, severity=severity, kind=kind)
        expected = {
            alert.pk
            for alert in many
            if state in ("all", alert.state) and severity in ("", alert.severity) and kind in ("", alert.kind)
        }
        assert {alert["id"] for alert in answer["alerts"]} == expected and answer["total"] == len(expected)


def test_alerts_of_a_run(reader: Reader, many: list[Alert]) -> None:
    for run in {alert.run for alert in many}:
        own = {alert["id"] for alert in reader.json(f"/runs/{run.pk}/alerts")["alerts"]}
        assert own == {alert.pk for alert in many if alert.run == run}
        assert own == {alert["id"] for alert in reader.json("/alerts", run=run.pk)["alerts"]}


def test_what_the_page_leaves_out_is_refused(reader: Reader, many: list[Alert]) -> None:
    assert "open, acknowledged" in reader.refused("/alerts", state="closed")["hint"]
    assert "no severity" in reader.refused("/alerts", severity="bad")["message"]
    assert "no kind" in reader.refused("/alerts", kind="x")["message"]
    foreign = make_run(create_project("elsewhere", "Elsewhere"), "foreign")
    alert = Alert.objects.create(
        run=foreign, kind="loss_nan", severity="warning", onset_step=1, step=1, message="x"
    )
    assert "no alert" in reader.refused("/alerts", after=alert.pk)["message"]
    assert reader.refused(f"/runs/{foreign.pk}/alerts")["code"] == "unknown_run"
    assert reader.json("/alerts", run=foreign.pk)["total"] == 0


def test_one_alert_has_its_evidence_and_its_history(
    reader: Reader, seeded: Seeded, many: list[Alert]
) -> None:
    stored = seeded.faulty.alerts.order_by("-id")[0]
    answer = reader.json(f"/alerts/{stored.pk}")
    (listed,) = [
        row for row in reader.json("/alerts", run=seeded.faulty.pk)["alerts"] if row["id"] == stored.pk
    ]
    assert {name: answer[name] for name in listed} == listed
    assert answer["evidence"] == stored.evidence and answer["history"][-1]["kind"] == "opened"
    elsewhere = make_run(create_project("elsewhere", "Elsewhere"), "run")
    foreign = Alert.objects.create(
        run=elsewhere, kind="loss_nan", severity="critical", onset_step=1, step=1, message="x"
    )
    for number in (foreign.pk, 10**12):
        assert reader.refused(f"/alerts/{number}")["code"] == "not_found"
