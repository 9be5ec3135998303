"""The list of a project's alerts: what it shows, in groups by run or by cause."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import urlencode
from uuid import UUID

from django.core.paginator import Page, Paginator
from django.db.models import Prefetch, QuerySet

from fp8scope_dashboard.alerts.models import (
    Alert,
    AlertState,
    Delivery,
    EntryKind,
    HistoryEntry,
    RuleKind,
    Severity,
)
from fp8scope_dashboard.pages import formatting
from fp8scope_dashboard.pages.address_values import uuid_in
from fp8scope_dashboard.pages.alerts import rule_words
from fp8scope_dashboard.pages.badges import ALERT_STATES, SEVERITIES, Badge
from fp8scope_dashboard.pages.charts.arms import Arm, Arms
from fp8scope_dashboard.runs.models import Run

ALERTS_A_PAGE: Final = 50
CAUSES_A_PAGE: Final = 20
MAX_GROUPED: Final = 5_000
"""Of more alerts that match, the newest are grouped by their causes."""
MAX_RUNS_OF_CAUSE: Final = 100
FILTERS: Final = {
    "open": "Open",
    "acknowledged": "Acknowledged",
    "muted": "Muted",
    "resolved": "Resolved",
    "all": "All",
}
BY_RUN, BY_CAUSE = "run", "cause"
GROUPINGS: Final = {BY_RUN: "By run", BY_CAUSE: "By cause"}
# Numbers, addresses in memory and identifiers differ between runs of the same cause. Numbers in names of
# tensors stay.
VARYING: Final = re.compile(
    r"0x[0-9a-f]+|[0-9a-f]{8}-[0-9a-f-]{27}|(?<![\w.])[+-]?\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?", re.IGNORECASE
)


@dataclass(frozen=True)
class ShownAlert:
    """An alert, prepared for the page."""

    alert: Alert
    severity: Badge
    state: Badge
    deliveries: list[Delivery]

    @classmethod
    def of(cls, alert: Alert) -> Self:
        """An alert whose deliveries have been read."""
        deliveries = list(alert.deliveries.all())
        return cls(alert, SEVERITIES[alert.severity], ALERT_STATES[alert.state], deliveries)

    @property
    def value(self) -> str:
        """The observed value, in the unit of the alert's kind."""
        return rule_words.amount(self.alert.kind, self.alert.value)

    @property
    def limit(self) -> str:
        """The limit of that value; empty without one."""
        return rule_words.amount(self.alert.kind, self.alert.threshold)

    @property
    def delay(self) -> int:
        """Steps from onset to detection."""
        return max(0, self.alert.step - self.alert.onset_step)

    @property
    def undelivered(self) -> list[str]:
        """The names of the channels that did not get it, each once."""
        return list(
            dict.fromkeys(delivery.channel.name for delivery in self.deliveries if delivery.failed_at)
        )

    @property
    def under_way(self) -> list[Delivery]:
        """The deliveries that have not ended."""
        return [
            delivery for delivery in self.deliveries if not delivery.failed_at and not delivery.delivered_at
        ]

    @property
    def has_chart(self) -> bool:
        """Return whether the alert stores series to draw."""
        return bool(self.alert.evidence.get("series"))


@dataclass(frozen=True, kw_only=True)
class AlertGroup:
    """The alerts of one run; or the newest alert of one cause, with the others of that cause."""

    key: str
    alerts: list[ShownAlert] = field(default_factory=list)
    run: Run | None = None
    arm: Arm | None = None
    others: Sequence[Alert] = ()
    """Of a cause: all its alerts, the newest of each run first; at most MAX_RUNS_OF_CAUSE."""
    count: int = 0
    runs: int = 0

    @property
    def facts(self) -> str:
        """The numbers beside the heading."""
        count = self.count or len(self.alerts)
        words = f"{formatting.count(count)} alert{'s' if count != 1 else ''}"
        if self.runs > 1:
            return f"{words} of {formatting.count(self.runs)} runs"
        critical = sum(shown.alert.severity == Severity.CRITICAL for shown in self.alerts)
        return f"{words}, {critical} critical" if critical and len(self.alerts) > 1 else words

    @property
    def open_ids(self) -> list[int]:
        """Of a cause: the alerts that can be acknowledged together."""
        return [alert.pk for alert in self.others if alert.state == AlertState.OPEN]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The choice of alerts that the list shows, and their grouping. Empty fields do not restrict it."""

    state: str
    severity: str = ""
    kind: str = ""
    run: UUID | None = None
    by: str = BY_RUN

    @classmethod
    def of(cls, query: Mapping[str, str], default_state: str) -> Filter:
        """The filter in an address; what is not known there is left out."""
        state, severity, kind = query.get("state", ""), query.get("severity", ""), query.get("kind", "")
        by = query.get("by", "")
        return cls(
            state=state if state in FILTERS else default_state,
            severity=severity if severity in Severity.values else "",
            kind=kind if kind in RuleKind.values else "",
            run=uuid_in(query.get("run", "")),
            by=by if by in GROUPINGS else BY_RUN,
        )

    def apply(self, alerts: QuerySet[Alert]) -> QuerySet[Alert]:
        """The alerts that are shown, in any state."""
        chosen = {"severity": self.severity, "kind": self.kind, "run": self.run}
        return alerts.filter(**{name: value for name, value in chosen.items() if value})

    def in_state(self, alerts: QuerySet[Alert]) -> QuerySet[Alert]:
        """The alerts that are shown, newest first."""
        chosen = in_state(self.apply(alerts), self.state)
        return chosen.order_by("-opened_at", "-id")

    def address(self, state: str, page: int = 1, by: str = "") -> str:
        """The query of the same list in another state or grouping, or of another page of it."""
        fields = {"severity": self.severity, "kind": self.kind, "run": self.run and str(self.run)}
        grouping = by or self.by
        fields["by"] = grouping if grouping != BY_RUN else ""
        fields["page"] = str(page) if page > 1 else ""
        return urlencode({"state": state} | {name: value for name, value in fields.items() if value})


def in_state(matching: QuerySet[Alert], state: str) -> QuerySet[Alert]:
    """Those in a state of FILTERS."""
    return matching if state == "all" else matching.filter(state=state)


def cause_of(kind: str, message: str) -> tuple[str, str]:
    """Return what alerts of one cause have in common: their kind, and their message without what varies."""
    return kind, " ".join(VARYING.sub("#", message).split())


def listed(newest: QuerySet[Alert], number: str | None, by: str, arms: Arms) -> tuple[list[AlertGroup], Page]:  # type: ignore[type-arg]
    """The groups of a page of the list, and the page's number. Takes the alerts, the newest first."""
    if by == BY_CAUSE:
        return _by_cause(newest, number, arms)
    page = Paginator(newest, ALERTS_A_PAGE).get_page(number)
    start = max(0, page.start_index() - 1)
    return _by_run(newest[start : page.end_index()], arms), page


def _by_run(alerts: QuerySet[Alert], arms: Arms) -> list[AlertGroup]:
    """Alerts by run, in the order of each run's first one; the critical ones of a run come first."""
    groups: dict[UUID, AlertGroup] = {}
    for alert in _read(alerts):
        group = groups.setdefault(
            alert.run_id, AlertGroup(key=str(alert.run_id), run=alert.run, arm=arms.of(alert.run))
        )
        group.alerts.append(ShownAlert.of(alert))
    for group in groups.values():
        # The sort is stable: the newest first among those of a severity.
        group.alerts.sort(key=lambda shown: shown.alert.severity != Severity.CRITICAL)
    return list(groups.values())


def _by_cause(newest: QuerySet[Alert], number: str | None, arms: Arms) -> tuple[list[AlertGroup], Page]:  # type: ignore[type-arg]
    """Alerts by cause: those of most runs first, then the newest."""
    causes: defaultdict[tuple[str, str], list[tuple[int, UUID]]] = defaultdict(list)
    for pk, run_id, kind, message in newest.values_list("pk", "run_id", "kind", "message")[:MAX_GROUPED]:
        causes[cause_of(kind, message)].append((pk, run_id))
    ordered = sorted(causes.values(), key=lambda members: -len({run_id for _, run_id in members}))
    page = Paginator(ordered, CAUSES_A_PAGE).get_page(number)
    shown = [members[:MAX_RUNS_OF_CAUSE] for members in page.object_list]
    first = {alert.pk: alert for alert in _read(newest.filter(pk__in=[members[0][0] for members in shown]))}
    others = newest.filter(pk__in=[pk for members in shown for pk, _ in members]).select_related("run")
    by_id = {alert.pk: alert for alert in others}
    groups = []
    for members, all_members in zip(shown, page.object_list, strict=True):
        alert = first[members[0][0]]
        groups.append(
            AlertGroup(
                key=f"cause-{alert.pk}",
                alerts=[ShownAlert.of(alert)],
                run=alert.run,
                arm=arms.of(alert.run),
                others=[by_id[pk] for pk, _ in members],
                count=len(all_members),
                runs=len({run_id for _, run_id in all_members}),
            )
        )
    return groups, page


def _read(alerts: QuerySet[Alert]) -> QuerySet[Alert]:
    """Events with everything that the list shows of them."""
    deliveries = Prefetch("deliveries", Delivery.objects.select_related("channel"))
    comments = Prefetch("history", HistoryEntry.objects.filter(kind=EntryKind.COMMENT), to_attr="comments")
    return alerts.select_related("run", "rule", "acknowledged_by").prefetch_related(deliveries, comments)
