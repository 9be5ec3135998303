"""Alerts of runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fp8scope.client.connection import Connection, Query
from fp8scope.client.fields import read_object, time_of

ALERTS_A_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class RunAlert:
    """An alert. The condition began between the steps `earliest_step` and `onset_step`.

    Attributes:
        run_id, run: id and name of the run.
        step: the step at which the condition was detected.
        state: open, acknowledged, muted or resolved.
    """

    id: int
    run_id: str
    run: str
    kind: str
    title: str
    severity: str
    state: str
    step: int
    onset_step: int
    earliest_step: int
    value: float | None
    threshold: float | None
    message: str
    tensors: tuple[str, ...]
    opened_at: datetime
    resolved_at: datetime | None
    acknowledged_at: datetime | None
    acknowledged_by: str
    url: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "RunAlert":
        """An alert of an answer."""
        times = {name: time_of(answer[name]) for name in ("opened_at", "resolved_at", "acknowledged_at")}
        run = answer["run"]
        return read_object(cls, answer, run_id=str(run["id"]), run=run["name"], **times)


@dataclass(frozen=True, kw_only=True)
class AlertPage:
    """A page of alerts, newest first. `next` is `after` of the following page; None on the last."""

    alerts: tuple[RunAlert, ...]
    total: int
    next: int | None


@dataclass(frozen=True, kw_only=True)
class AlertDetails:
    """An alert with its evidence.

    Attributes:
        evidence: the numbers that the detector saw; their names depend on the kind of the alert.
        history: what happened to it, newest first: kind, at, by and text.
    """

    alert: RunAlert
    evidence: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...]


def read_page(connection: Connection, query: Query) -> AlertPage:
    """One page of a project's alerts."""
    answer = connection.json("/alerts", query)
    alerts = tuple(map(RunAlert.of, answer["alerts"]))
    return AlertPage(alerts=alerts, total=answer["total"], next=answer["next"])


def read_details(connection: Connection, alert: int) -> AlertDetails:
    """One alert with its evidence."""
    answer = connection.json(f"/alerts/{alert}")
    history = tuple(answer["history"])
    return AlertDetails(alert=RunAlert.of(answer), evidence=answer["evidence"], history=history)


def read_alerts(connection: Connection, path: str, query: Query) -> Iterator[RunAlert]:
    """The alerts at a path, newest first, page after page."""
    after: int | None = None
    while True:
        answer = connection.json(path, {**query, "after": after, "limit": ALERTS_A_PAGE})
        yield from map(RunAlert.of, answer["alerts"])
        after = answer["next"]
        if after is None:
            return
