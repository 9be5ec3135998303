"""Rules and alerts: the interface for the rest of the dashboard."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db.models import BigIntegerField, QuerySet
from django.db.models.functions import Coalesce
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detection.baselines import few_points
from fp8scope_dashboard.alerts.detection.run_detection import evaluate, state_of
from fp8scope_dashboard.alerts.models import RUN_WIDE, Alert, DetectorState, Rule
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.runs.models import Run, RunState

__all__ = [
    "alerts_after",
    "create_default_rules",
    "evaluate",
    "alerts_of",
    "numbered",
    "unjudged",
    "unread_runs",
]

# Alerts in one response; the training process gets the others with its next message.
ALERTS_AT_ONCE = 1_000
# The sweeper looks this far back for runs whose change of state was not announced.
STATE_IS_NEWS = timedelta(hours=1)
STATE_READ = ("run_id", "rows", "state__run_state")


def create_default_rules(project: Project) -> None:
    """Create one rule with default parameters for each built-in kind that the project does not have yet."""
    present = set(Rule.objects.filter(project=project, run=None).values_list("kind", flat=True))
    Rule.objects.bulk_create(
        Rule(
            project=project,
            kind=kind.name,
            severity=kind.severity,
            parameters=rules.validate(kind.name, {}),
            enabled=kind.enabled,
        )
        for kind in rules.KINDS.values()
        if kind.is_default and kind.name not in present
    )


def alerts_of(project: Project) -> QuerySet[Alert]:
    """The alerts of a project, without those of deleted runs, which are hidden everywhere."""
    return Alert.objects.filter(run__project=project, run__deleted_at=None)


def numbered(alerts: QuerySet[Alert]) -> Any:
    """The alerts with their `number`; see `alerts_after`."""
    return alerts.annotate(number=Coalesce("sent_again_as", "id", output_field=BigIntegerField()))


def alerts_after(run_id: UUID, after: int) -> list[dict[str, Any]]:
    """The run's alerts with a number greater than `after`, oldest first, in the form of docs/wire.md.

    The number of an alert, `id` in the response, is its own id, until the condition comes back: then
    the alert gets a new number, so that the training process gets it again. Numbers of a run are taken and
    committed under one lock, so that they appear in ascending order.
    """
    fields = (
        "kind",
        "rule_name",
        "severity",
        "step",
        "onset_step",
        "value",
        "threshold",
        "message",
        "opened_at",
    )
    alerts = numbered(Alert.objects.filter(run_id=run_id)).filter(number__gt=after).order_by("number")
    alerts = alerts[:ALERTS_AT_ONCE]
    return [
        {"id": alert.pop("number"), "rule": alert.pop("rule_name"), **alert}
        for alert in alerts.values("number", "opened_at", *fields)
    ]


def unjudged(run: Run) -> list[str]:
    """Return why the loss is not compared with its baseline, in sentences; empty if it is."""
    row = DetectorState.objects.filter(run=run, writer=RUN_WIDE).first()
    if row is None:
        return []
    following = Rule.objects.filter(project=run.project_id, kind="above_baseline", enabled=True)
    states = [row.state.get(str(rule), {}) for rule in following.values_list("pk", flat=True)]
    notes = {state.get("note", "") for state in states}
    if run.state != RunState.RUNNING:
        # A run that goes on may still have enough.
        notes |= {few_points(state["compared"]) for state in states if "compared" in state}
    return sorted(note for note in notes if note)


def unread_runs() -> list[UUID]:
    """Runs with stored rows, or baselines with stored rows, that the detectors have not read.

    Also runs that have ended or become silent since.
    """
    unread = []
    for project in comparison_runs.active_projects():
        fields = ("id", "group", "baseline", "rows_stored", "state", "heartbeat_at", "finished_at")
        runs = Run.objects.filter(project=project).values_list(*fields)
        # By group and by id: a baseline is either.
        of_group: dict[str, int] = defaultdict(int)
        for run_id, group, _, rows, *_ in runs:
            of_group[group] += rows
            of_group[str(run_id)] += rows
        states = DetectorState.objects.filter(run__project=project, writer=RUN_WIDE)
        read = {run_id: (rows, state) for run_id, rows, state in states.values_list(*STATE_READ)}
        for run_id, group, baseline, rows, state, heard, finished_at in runs:
            own = 0 if baseline in (group, str(run_id)) else rows
            behind = rows if not baseline else of_group[baseline] + own
            read_rows, read_state = read.get(run_id, (None, RunState.RUNNING))
            is_read = read_state == state_of(state, finished_at)
            changed = not is_read and timezone.now() - heard < STATE_IS_NEWS
            if (behind and read_rows != behind) or changed:
                unread.append(run_id)
    return unread
