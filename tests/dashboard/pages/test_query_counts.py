"""The pages with lists: the number of their queries does not depend on how much they list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fp8scope_dashboard.accounts.models import Membership, User
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery, HistoryEntry, Rule
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.runs.models import SavedView
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink


def add_run(visitor: Visitor, number: int) -> None:
    make_run(visitor.project, f"run {number}", precision="fp8", group=f"g{number}", baseline="bf16")
    SavedView.objects.create(project=visitor.project, owner=visitor.user, name=f"v{number}", query="q=x")


def add_alert(visitor: Visitor, number: int) -> None:
    rule = Rule.objects.get(project=visitor.project, kind="loss_spike")
    channel = Channel.objects.create(
        project=visitor.project, name=f"c{number}", sealed=encrypt_json({"url": "https://x.test"})
    )
    rule.channels.add(channel)
    event = Alert.objects.create(
        run=make_run(visitor.project, f"run {number}"), rule=rule, kind=rule.kind, severity="warning",
        onset_step=number, step=number, message="Up.", acknowledged_by=visitor.user,
    )  # fmt: skip
    Delivery.objects.create(event=event, channel=channel, failed_at=event.opened_at)
    HistoryEntry.objects.create(event=event, kind="comment", user=visitor.user, text="Seen.")


def add_person(visitor: Visitor, number: int) -> None:
    user = User.objects.create_user(f"someone {number}")
    Membership.objects.create(user=user, project=visitor.project)
    create_token(visitor.project, f"t{number}", user)


def add_report(visitor: Visitor, number: int) -> None:
    report = SharedReport.objects.create(
        project=visitor.project, title=f"r{number}", content={}, created_by=visitor.user
    )
    ShareLink.objects.create(report=report, digest=bytes([number]) * 32)


PAGES: dict[str, Callable[[Visitor, int], None]] = {
    "": add_run,
    "?by=group": add_run,
    "?page=2": add_run,
    "charts/": add_run,
    "charts/scatter.json?setting=config.lr&result=loss": add_run,
    "compare/": add_run,
    "alerts/?state=all": add_alert,
    "rules/": add_alert,
    "channels/": add_alert,
    "settings/": add_person,
    "reports/": add_report,
}


def queries_of(visitor: Visitor, rest: str) -> list[str]:
    with CaptureQueriesContext(connection) as queries:
        assert visitor.client.get(visitor.address(rest)).status_code == 200
    return [query["sql"] for query in queries]


@pytest.mark.parametrize("rest", PAGES)
def test_it_works(admin: Visitor, rest: str) -> None:
    for number in range(2):
        PAGES[rest](admin, number)
    # The first visit fills what the process remembers.
    queries_of(admin, rest)
    few = queries_of(admin, rest)
    for number in range(2, 7):
        PAGES[rest](admin, number)
    many = queries_of(admin, rest)
    assert len(many) <= len(few), "\n".join(many)
