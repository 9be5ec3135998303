"""The alerts page: listing, acknowledging and muting alerts."""

from __future__ import annotations

import re
from datetime import time, timedelta
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, get_json, html
from django.utils import timezone

from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.models import Alert, AlertState, Channel, Delivery, Rule
from fp8scope_dashboard.pages.access import newest_alert, open_alerts
from fp8scope_dashboard.runs import bulk
from fp8scope_dashboard.runs.models import BulkAction, Run


def make_event(visitor: Visitor, **fields: Any) -> Alert:
    defaults = {
        "kind": "loss_spike",
        "severity": "warning",
        "onset_step": 1,
        "step": 4,
        "message": "Up <it> went.",
    }
    defaults["rule"] = Rule.objects.get(project=visitor.project, kind="loss_spike")
    if "run" not in fields:
        fields["run"] = make_run(visitor.project, "a run")
    return Alert.objects.create(**(defaults | fields))


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    events = Alert.objects.filter(run=seeded.faulty)
    page = html(admin, "alerts/")
    assert events.count() >= 2
    for event in events:
        assert f'id="event-{event.id}"' in page and f"alerts/{event.id}/evidence.json" in page
    assert page.count("group-") == 2, "there is one group, labelled by its heading"


def test_escapes_the_message_and_shows_the_delay(admin: Visitor) -> None:
    make_event(admin)
    page = html(admin, "alerts/")
    assert "Up &lt;it&gt; went." in page and "3 steps later" in page


def test_empty_states(admin: Visitor) -> None:
    page = html(admin, "alerts/")
    assert "No alerts" in page and "Saturation rate" in page
    assert "Saturation rate</span>" in page and "Saturation rate, off</span>" not in page
    Rule.objects.filter(project=admin.project, kind="saturation_rate").update(enabled=False)
    assert "Saturation rate, off</span>" in html(admin, "alerts/")
    event = make_event(admin)
    Alert.objects.update(state=AlertState.RESOLVED, resolved_at=timezone.now())
    assert f"event-{event.id}" in html(admin, "alerts/"), "without open alerts, resolved ones are listed"
    assert "No open alerts" in html(admin, "alerts/?state=open")


def test_filters_by_run(admin: Visitor) -> None:
    listed, other = make_event(admin), make_event(admin)
    page = html(admin, f"alerts/?run={listed.run_id}")
    assert f"event-{listed.id}" in page and f"event-{other.id}" not in page
    assert f"event-{other.id}" in html(admin, "alerts/?run=nonsense")


def test_acknowledging(member: Visitor) -> None:
    event = make_event(member)
    answer = member.client.post(member.address(f"alerts/{event.id}/acknowledge"), follow=True)
    event.refresh_from_db()
    assert event.state == AlertState.ACKNOWLEDGED and event.acknowledged_by == member.user
    assert "Acknowledged: Loss spike in a run." in answer.content.decode()
    assert "by mia" in html(member, "alerts/?state=acknowledged")


def test_switching_a_rule_off_and_on(admin: Visitor) -> None:
    event = make_event(admin, seen_by=[["run/0", 1]])
    rule = event.rule
    assert rule is not None
    for enabled in ("0", "1"):
        admin.client.post(admin.address(f"rules/{rule.id}/switch"), {"enabled": enabled})
        rule.refresh_from_db()
        assert rule.enabled == (enabled == "1")
    event.refresh_from_db()
    assert event.state == AlertState.RESOLVED, "nothing else would end its alert"


def test_many_alerts_are_listed_in_pages(admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_event(admin), make_event(admin, severity="critical")
    assert 'aria-label="Pages"' not in html(admin, "alerts/")
    monkeypatch.setattr("fp8scope_dashboard.pages.alerts.listing.ALERTS_A_PAGE", 1)
    first, second = html(admin, "alerts/?severity="), html(admin, "alerts/?page=2")
    assert f'id="event-{new.id}"' in first and f'id="event-{old.id}"' not in first
    assert f'id="event-{old.id}"' in second and "2 to 2 of 2 alerts" in second
    assert 'href="?state=open&amp;page=2" rel="next"' in first and 'href="?state=open" rel="prev"' in second
    filtered = html(admin, "alerts/?severity=warning&page=7")
    assert f'id="event-{old.id}"' in filtered and "Pages" not in filtered


def test_charts_of_many_alerts_open_on_demand(
    admin: Visitor, seeded: Seeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 'class="event__chart"' in html(admin, "alerts/") and "<summary>Chart" not in html(admin, "alerts/")
    monkeypatch.setattr("fp8scope_dashboard.pages.alerts.views.MAX_CHARTS", 1)
    page = html(admin, "alerts/")
    charts = Alert.objects.filter(run=seeded.faulty).count()
    assert page.count("<summary>Chart") == charts == page.count('/evidence.json?format=svg"')


def test_critical_alerts_of_a_run_come_first(admin: Visitor) -> None:
    critical = make_event(admin, severity="critical")
    newer = make_event(admin, run=critical.run, onset_step=9)
    page = html(admin, "alerts/")
    assert page.index(f'id="event-{critical.id}"') < page.index(f'id="event-{newer.id}"')
    assert "2 alerts, 1 critical" in page


def test_hides_the_alerts_of_deleted_runs(admin: Visitor) -> None:
    event, kept = make_event(admin), make_event(admin)
    bulk.change(admin.project, Run.objects.filter(pk=event.run_id), BulkAction.Kind.DELETE, admin.user)
    page = html(admin, "alerts/?state=all")
    assert f'id="event-{event.id}"' not in page and f'id="event-{kept.id}"' in page
    assert open_alerts(admin.project) == 1 and newest_alert(admin.project) == kept.id
    assert admin.client.get(admin.address(f"alerts/{event.id}/")).status_code == 404
    assert get_json(admin, "alerts/recent.json", after="0")["open"] == 1
    chosen = {"alerts": [str(event.id)]}
    admin.client.post(admin.address("alerts/acknowledge"), chosen)
    event.refresh_from_db()
    assert event.state == AlertState.OPEN


def test_filters_by_severity_and_kind(admin: Visitor) -> None:
    spike = make_event(admin)
    failed = make_event(admin, kind="loss_not_finite", severity="critical")
    for query, shown in (
        ("severity=critical", failed),
        ("kind=loss_spike", spike),
        ("severity=warning&kind=loss_spike&state=all", spike),
    ):
        page = html(admin, f"alerts/?{query}")
        other = spike if shown is failed else failed
        assert f'id="event-{shown.id}"' in page and f'id="event-{other.id}"' not in page
    assert "No alert matches" in html(admin, "alerts/?severity=critical&kind=loss_spike")
    assert f'id="event-{spike.id}"' in html(admin, "alerts/?severity=nonsense&kind=x")


def test_acknowledges_the_chosen_alerts(member: Visitor) -> None:
    chosen, left = [make_event(member) for _ in range(2)], make_event(member)
    ids = [*(str(event.id) for event in chosen), "x", "٣", "9" * 30]
    answer = member.client.post(member.address("alerts/acknowledge"), {"alerts": ids}, follow=True)
    assert "Acknowledged 2 alerts, just now." in answer.content.decode()
    assert {event.state for event in Alert.objects.filter(pk__in=[each.pk for each in chosen])} == {
        "acknowledged"
    }
    left.refresh_from_db()
    assert left.state == AlertState.OPEN
    answer = member.client.post(member.address("alerts/acknowledge"), {"alerts": ids}, follow=True)
    assert "Choose the alerts" in answer.content.decode()


def test_acknowledges_all_that_match_and_undoes_it(member: Visitor, admin: Visitor) -> None:
    seen = [make_event(member) for _ in range(3)]
    other, muted = make_event(member, severity="critical"), make_event(member, state=AlertState.MUTED)
    newest = newest_alert(member.project)
    later = make_event(member)
    form = {"all": "1", "severity": "warning", "newest": str(newest), "next": member.address("alerts/")}
    page = member.client.post(member.address("alerts/acknowledge"), form, follow=True).content.decode()
    states = dict(Alert.objects.values_list("pk", "state"))
    assert {states[event.pk] for event in seen} == {"acknowledged"}
    assert states[other.pk] == states[later.pk] == "open", "of another severity; opened after the page"
    assert states[muted.pk] == "muted"
    assert "Acknowledged 3 alerts, just now." in page and "acknowledge/undo" not in html(admin, "alerts/")
    (at,) = set(Alert.objects.filter(state="acknowledged").values_list("acknowledged_at", flat=True))
    assert at is not None
    # Others have changed one of them since.
    lifecycle.resolve(seen[0], admin.user)
    undo = member.address("alerts/acknowledge/undo")
    for nothing in ("", "nonsense", "2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00"):
        assert (
            "Nothing was changed" in member.client.post(undo, {"at": nothing}, follow=True).content.decode()
        )
    assert "Nothing" in admin.client.post(undo, {"at": at.isoformat()}, follow=True).content.decode()
    page = member.client.post(undo, {"at": at.isoformat()}, follow=True).content.decode()
    assert "2 alerts are open again." in page and "acknowledge/undo" not in page
    assert dict(Alert.objects.values_list("pk", "state")) == states | {
        seen[0].pk: "resolved",
        seen[1].pk: "open",
        seen[2].pk: "open",
    }
    assert [(entry.kind, entry.user_name) for entry in seen[1].history.all()] == [
        ("acknowledged", "mia"),
        ("unacknowledged", "mia"),
    ]


def test_acknowledging_can_be_undone_for_some_time(member: Visitor) -> None:
    event = make_event(member)
    before = timezone.now() - lifecycle.UNDO_FOR
    for at, count in ((before, 0), (before + timedelta(minutes=1), 1)):
        Alert.objects.update(state="acknowledged", acknowledged_by=member.user, acknowledged_at=at)
        assert ("acknowledge/undo" in html(member, "alerts/")) == (count == 1)
        assert lifecycle.undo_acknowledgement(member.project, member.user, at) == count
    event.refresh_from_db()
    assert event.state == AlertState.OPEN and event.acknowledged_by is None


def test_too_many_alerts_are_not_acknowledged_at_once(
    member: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "MAX_AT_ONCE", 2)
    for _ in range(3):
        make_event(member)
    form = {"all": "1", "newest": str(newest_alert(member.project))}
    page = member.client.post(member.address("alerts/acknowledge"), form, follow=True).content.decode()
    assert "At most 2 alerts" in page and not Alert.objects.exclude(state="open").exists()


def test_tells_open_pages_of_new_alerts(admin: Visitor, stranger: Visitor) -> None:
    first, second = make_event(admin), make_event(admin, severity="critical")
    make_event(stranger)
    lifecycle.resolve(first)

    def recent(after: str) -> Any:
        return admin.client.get(admin.address(f"alerts/recent.json?after={after}")).json()

    answer = recent("0")
    assert [alert["number"] for alert in answer["alerts"]] == [second.id] and answer["newest"] == second.id
    assert answer["alerts"][0]["url"] == admin.address(f"alerts/{second.id}/")
    assert recent(str(second.id)) == {"newest": second.id, "alerts": [], "open": 1, "more": 0}
    lifecycle.reopen(first)
    (again,) = recent(str(second.id))["alerts"]
    assert again["number"] > second.id and again["url"] == admin.address(f"alerts/{first.id}/")
    assert recent("nonsense")["more"] == 0
    assert f'data-newest-alert="{again["number"]}"' in html(admin, "alerts/")


@pytest.mark.parametrize(
    ("requested", "redirected"),
    [
        ("/p/research/alerts/?state=all", "/p/research/alerts/?state=all"),
        ("https://evil.test/", "/p/research/alerts/"),
        ("//evil.test/p/research/", "/p/research/alerts/"),
        ("/p/research/\\evil", "/p/research/alerts/"),
        ("", "/p/research/alerts/"),
    ],
)
def test_redirects_to_pages_of_this_project_only(member: Visitor, requested: str, redirected: str) -> None:
    event = make_event(member)
    answer = member.client.post(member.address(f"alerts/{event.id}/acknowledge"), {"next": requested})
    assert answer["Location"] == redirected


def test_a_viewer_sees_no_buttons(viewer: Visitor) -> None:
    make_event(viewer)
    page = html(viewer, "alerts/")
    assert "Up &lt;it&gt; went." in page and "alerts/acknowledge" not in page and "/acknowledge" not in page


def test_shows_the_state_of_deliveries(admin: Visitor) -> None:
    event = make_event(admin)
    now = timezone.now()
    deliveries: dict[str, dict[str, Any]] = {
        "good": {"delivered_at": now},
        "bad": {"failed_at": now, "attempts": 8, "last_error": "The receiver answered 500."},
        "slow": {"attempts": 1, "last_error": "Nobody answered."},
    }
    for name, fields in deliveries.items():
        channel = Channel.objects.create(project=admin.project, name=name)
        Delivery.objects.create(event=event, channel=channel, **fields)
    page = html(admin, "alerts/")
    assert "good: delivered" not in page, "only what is not delivered"
    assert f'Not delivered to bad. <a href="{admin.address(f"alerts/{event.pk}/")}#history-title">Why' in page
    assert "bad: not delivered after 8 attempts: The receiver answered 500." in html(
        admin, f"alerts/{event.pk}/"
    )
    assert "slow: being sent, 1 attempt failed: Nobody answered." in page


def test_says_until_when_a_delivery_waits(admin: Visitor) -> None:
    event = make_event(admin)
    soon = timezone.now() + timedelta(minutes=5, seconds=30)
    many, quiet = (Channel.objects.create(project=admin.project, name=name) for name in ("many", "quiet"))
    Delivery.objects.create(event=event, channel=many, held=True, due_at=soon)
    assert re.search(
        r"many: above the channel’s limit: sent with others as a digest in 5.min", html(admin, "alerts/")
    )
    assert event.rule is not None
    event.rule.quiet_from, event.rule.quiet_to = time(22), time(6)
    event.rule.save()
    Delivery.objects.create(event=event, channel=quiet, due_at=soon)
    shown = f"waits for the end of the rule’s quiet hours, {soon:%Y-%m-%d %H:%M} UTC"
    assert f"quiet: {shown}" in html(admin, "alerts/")


def test_serves_the_evidence_as_a_figure(admin: Visitor, seeded: Seeded) -> None:
    for event in Alert.objects.filter(run=seeded.faulty):
        answer = admin.client.get(admin.address(f"alerts/{event.id}/evidence.json")).json()
        assert answer["summary"] == event.message and answer["figure"]["data"]
    bare = make_event(admin)
    assert "empty" in admin.client.get(admin.address(f"alerts/{bare.id}/evidence.json")).json()


def test_open_alerts_are_counted_on_every_page(admin: Visitor) -> None:
    make_event(admin)
    for rest in ("", "compare/", "evaluations/", "alerts/", "settings/"):
        assert '<span class="sr-only">, 1 open</span>' in html(admin, rest)


def test_a_refresh_gets_only_the_list(admin: Visitor) -> None:
    make_event(admin)
    assert html(admin, "alerts/", **{"HX-Target": "alerts"}).strip().startswith('<div id="alerts"')


def test_shows_what_other_rules_found_about_the_same_tensors(admin: Visitor) -> None:
    entry: dict[str, Any] = {"kind": "scale_frozen", "title": "Frozen scale", "severity": "critical"}
    entry |= {"onset_step": 1310, "step": 1319, "message": "The <scale> stays."}
    event = make_event(admin, evidence={"further": [entry]})
    assert "Also, for the same tensors: frozen scale since step 1\N{NARROW NO-BREAK SPACE}310." in html(
        admin, "alerts/"
    )
    page = html(admin, f"alerts/{event.id}/")
    assert (
        "Frozen scale (critical), noticed at step 1\N{NARROW NO-BREAK SPACE}319: The &lt;scale&gt; stays."
        in page
    )
