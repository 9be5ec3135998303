"""The alerts of a project or of one run, with the filters of their page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from uuid import UUID

from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest
from ninja import Path, Query, Router

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.alerts.models import Alert, RuleKind, Severity
from fp8scope_dashboard.alerts.services import alerts_of
from fp8scope_dashboard.analysis.onset_search import TensorOnset
from fp8scope_dashboard.api.auth import READER, RUN_READER, project_of, run_of
from fp8scope_dashboard.api.reading.answers import as_reference
from fp8scope_dashboard.api.reading.schemas import AlertOut, AlertsOut
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.pages.alerts.listing import FILTERS, Filter
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import InvalidError, UnknownNameError

MAX_ALERTS, MAX_ENTRIES = 100, 100

router = Router(tags=["alerts"], auth=READER)
State = Annotated[str, Query(description=", ".join(FILTERS))]
AlertSeverity = Annotated[str, Query(description=", ".join(Severity.values))]
Kind = Annotated[str, Query(max_length=64, description="A kind of rule; docs/alerts.md lists them.")]
After = Annotated[int | None, Query(ge=0, le=limits.MAX_INT, description="`next` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=MAX_ALERTS)]


@router.get("/alerts", response={200: AlertsOut, ERRORS: schemas.ErrorOut})
def list_alerts(
    request: HttpRequest,
    state: State = "all",
    severity: AlertSeverity = "",
    kind: Kind = "",
    run: UUID | None = None,
    after: After = None,
    limit: Limit = MAX_ALERTS,
) -> dict[str, Any]:
    """The project's alerts, newest first, in pages."""
    chosen = _filter(state, severity, kind, run)
    return _answer(request, chosen.in_state(alerts_of(project_of(request))), after, limit)


@router.get("/runs/{run}/alerts", response={200: AlertsOut, ERRORS: schemas.ErrorOut}, auth=RUN_READER)
def list_run_alerts(
    request: HttpRequest,
    run: UUID,
    state: State = "all",
    severity: AlertSeverity = "",
    kind: Kind = "",
    after: After = None,
    limit: Limit = MAX_ALERTS,
) -> dict[str, Any]:
    """The alerts of a run, newest first, in pages."""
    stored = run_of(request, run)
    chosen = _filter(state, severity, kind, stored.pk)
    return _answer(request, chosen.in_state(alerts_of(stored.project)), after, limit)


@router.get("/alerts/{alert}", response={200: AlertOut, ERRORS: schemas.ErrorOut})
def get_alert(request: HttpRequest, alert: Annotated[int, Path(ge=0, le=limits.MAX_INT)]) -> dict[str, Any]:
    """One alert with its evidence, and with what happened to it, newest first."""
    of_project = alerts_of(project_of(request)).select_related("run", "run__project", "acknowledged_by")
    stored = of_project.filter(pk=alert).first()
    if stored is None:
        raise Http404
    entries = stored.history.select_related("user").order_by("-id")[:MAX_ENTRIES]
    return {
        **_alert(stored, server_address(request)),
        "evidence": stored.evidence,
        "history": [
            {"kind": entry.kind, "at": entry.at, "by": entry.user_name, "text": entry.text}
            for entry in entries
        ],
    }


def _filter(state: str, severity: str, kind: str, run: UUID | None) -> Filter:
    """The filter of the page. Raises InvalidError for a value that the page would leave out."""
    for name, text, accepted in (
        ("state", state, list(FILTERS)),
        ("severity", severity, ["", *Severity.values]),
        ("kind", kind, ["", *RuleKind.values]),
    ):
        if text not in accepted:
            listed = ", ".join(value for value in accepted if value)
            raise InvalidError(f"There is no {name} {text[:64]!r}.", f"It is one of: {listed}.")
    return Filter(state=state, severity=severity, kind=kind, run=run)


def _answer(request: HttpRequest, newest: QuerySet[Alert], after: int | None, limit: int) -> dict[str, Any]:
    rest = newest if after is None else _beyond(newest, alerts_of(project_of(request)), after)
    read = list(rest.select_related("run", "run__project", "acknowledged_by")[: limit + 1])
    server = server_address(request)
    return {
        "alerts": [_alert(alert, server) for alert in read[:limit]],
        "total": newest.count(),
        "next": read[limit - 1].pk if len(read) > limit else None,
    }


def _beyond(newest: QuerySet[Alert], of_project: QuerySet[Alert], after: int) -> QuerySet[Alert]:
    pivot = of_project.filter(pk=after).values_list("opened_at", flat=True).first()
    if pivot is None:
        raise UnknownNameError(
            f"The project has no alert {after}, so no page begins after it.", "Begin again."
        )
    return newest.filter(Q(opened_at__lt=pivot) | Q(opened_at=pivot, id__lt=after))


def _alert(alert: Alert, server: str) -> dict[str, Any]:
    run = as_reference(alert.run, server)
    by = alert.acknowledged_by
    return {
        **{name: getattr(alert, name) for name in ("id", "kind", "title", "severity", "state", "step")},
        **{name: getattr(alert, name) for name in ("onset_step", "value", "threshold", "message")},
        **{name: getattr(alert, name) for name in ("opened_at", "resolved_at", "acknowledged_at")},
        "run": run,
        "earliest_step": TensorOnset(alert.onset_step, alert.after_step).earliest,
        "tensors": _names(alert.evidence.get("tensors", [])),
        "acknowledged_by": "" if by is None else by.get_username(),
        "url": f"{run['url'].partition('/runs/')[0]}/alerts/{alert.pk}/",
    }


def _names(entries: Sequence[Any]) -> list[str]:
    """The names of the tensors in an alert's evidence."""
    return [str(entry["name"] if isinstance(entry, dict) else entry) for entry in entries]
