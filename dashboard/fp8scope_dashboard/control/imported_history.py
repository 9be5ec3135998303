"""Alerts and commands of a run as part of its export, and their import.

Imported ones are records only: such an alert is not sent to channels, and such a command is not delivered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from django.utils import timezone
from ninja import Schema
from pydantic import AfterValidator, AwareDatetime, Field, FiniteFloat

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.alerts.lifecycle import LONGEST_COMMENT
from fp8scope_dashboard.alerts.models import Alert, AlertState, EntryKind, HistoryEntry, RuleKind, Severity
from fp8scope_dashboard.control.models import Command, CommandKind, CommandResult, ResultState
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs import notes
from fp8scope_dashboard.runs.models import Note, Run, StepNote
from fp8scope_dashboard.runs.notes import NewArtefact
from fp8scope_dashboard.text.numbers import NON_FINITE, json_number
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import InvalidError
from fp8scope_dashboard.wire.schemas import Natural, Text

MAX_RECORDS = 10_000
MAX_RESULTS = 10_000
MAX_DOCUMENT = 4 * limits.MIB
# What identifies an alert of a run.
ALERT_KEY = ("kind", "rule_name", "generation", "onset_step")
ALERT = (*ALERT_KEY, "severity", "state", "step", "message", "evidence")
ALERT_TIMES = (
    "step_time",
    "opened_at",
    "resolved_at",
    "acknowledged_at",
    "muted_until",
    "waiting_since",
    "escalated_at",
)
ENTRY = ("kind", "user_name", "text")
# The newest entries of an alert's history that are exported.
MAX_ENTRIES = 1_000
ALERTS_AT_ONCE = 100
COMMAND = ("kind", "arguments", "reason")
RESULT = ("state", "message", "step")


def _document(value: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(value)
    if len(text) > MAX_DOCUMENT or "\\u0000" in text:
        raise ValueError(f"must be at most {MAX_DOCUMENT} bytes of JSON without the character NUL")
    return value


Document = Annotated[dict[str, Any], AfterValidator(_document)]
Message = Annotated[Text, Field(max_length=500)]
# The name of a user, unique per server.
Person = Annotated[Text, Field(max_length=150)]
Number: TypeAlias = FiniteFloat | Literal["NaN", "Infinity", "-Infinity"]


class PastEntry(Schema):
    """An entry of an alert's audit trail."""

    kind: EntryKind
    at: AwareDatetime
    user_name: Person = ""
    text: Annotated[Text, Field(max_length=LONGEST_COMMENT)] = ""


class PastAlert(Schema):
    """An alert as stored, without its rule, which belongs to the project."""

    kind: RuleKind
    rule_name: Annotated[Text, Field(max_length=128)] = ""
    severity: Severity
    state: AlertState
    generation: Annotated[Text, Field(max_length=32)] = ""
    onset_step: Natural
    step: Natural
    step_time: AwareDatetime | None = None
    value: Number | None = None
    threshold: Number | None = None
    message: Message
    evidence: Document = {}
    opened_at: AwareDatetime
    resolved_at: AwareDatetime | None = None
    acknowledged_by: Person = ""
    acknowledged_at: AwareDatetime | None = None
    resolved_step: Natural | None = None
    muted_until: AwareDatetime | None = None
    waiting_since: AwareDatetime | None = None
    escalated_at: AwareDatetime | None = None
    reopened: Natural = 0
    history: Annotated[list[PastEntry], Field(max_length=MAX_ENTRIES)] = []


class PastResult(Schema):
    writer: UUID
    state: ResultState
    message: Message = ""
    step: Natural | None = None
    at: AwareDatetime


class AlertKey(Schema):
    """Identifies an alert of a run."""

    kind: RuleKind
    rule_name: Annotated[Text, Field(max_length=128)] = ""
    generation: Annotated[Text, Field(max_length=32)] = ""
    onset_step: Natural


class PastCommand(Schema):
    """A command as stored, with its results."""

    kind: CommandKind
    arguments: Document = {}
    reason: Message = ""
    given_by: Person = ""
    alert: AlertKey | None = None
    given_at: AwareDatetime
    expires_at: AwareDatetime
    delivered_at: AwareDatetime | None = None
    results: Annotated[list[PastResult], Field(max_length=MAX_RESULTS)] = []


def alerts_of(run_id: UUID) -> Iterator[tuple[int, dict[str, Any]]]:
    """The run's alerts, oldest first, each with its step, in the form of PastAlert."""
    for alert in _alerts_in_pages(run_id):
        yield (
            alert.step,
            {
                **{name: getattr(alert, name) for name in ALERT},
                "value": _as_json(alert.value),
                "threshold": _as_json(alert.threshold),
                "acknowledged_by": _name_of(alert.acknowledged_by),
                "reopened": alert.reopened,
                "resolved_step": alert.resolved_step,
                **_times(alert, *ALERT_TIMES),
                "history": [
                    {name: getattr(entry, name) for name in ENTRY} | _times(entry, "at")
                    for entry in list(alert.history.all())[-MAX_ENTRIES:]
                ],
            },
        )


def _alerts_in_pages(run_id: UUID) -> Iterator[Alert]:
    """The run's alerts, oldest first. A cursor would need a transaction for as long as an export is sent."""
    alerts = Alert.objects.filter(run_id=run_id).select_related("acknowledged_by").prefetch_related("history")
    last = 0
    while page := list(alerts.filter(id__gt=last).order_by("id")[:ALERTS_AT_ONCE]):
        yield from page
        last = page[-1].id


def commands_of(run_id: UUID) -> Iterator[tuple[int, dict[str, Any]]]:
    """The run's commands, oldest first, each with the step of its last result, in the form of PastCommand."""
    stored = Command.objects.filter(run_id=run_id).select_related("given_by", "event")
    for command in stored.prefetch_related("results").order_by("id"):
        results = list(command.results.all())
        alert = command.event
        yield (
            max((result.step or 0 for result in results), default=0),
            {
                **{name: getattr(command, name) for name in COMMAND},
                "given_by": _name_of(command.given_by),
                "alert": None if alert is None else {name: getattr(alert, name) for name in ALERT_KEY},
                **_times(command, "given_at", "expires_at", "delivered_at"),
                "results": [
                    {"writer": str(result.writer), **_times(result, "at")}
                    | {name: getattr(result, name) for name in RESULT}
                    for result in results
                ],
            },
        )


def store_alert(run: Run, past: PastAlert) -> None:
    """Store an imported alert. If the run has one of the same kind, generation and onset, that one is kept.

    Raises:
        InvalidError: if the run has too many.
    """
    _check_room(Alert.objects.filter(run=run).count(), "alerts")
    fields = past.model_dump(exclude={*ALERT_KEY, "acknowledged_by", "history"})
    fields["waiting_since"] = past.waiting_since or past.opened_at
    for name in ("value", "threshold"):
        fields[name] = NON_FINITE.get(fields[name], fields[name])
    fields["acknowledged_by"] = _person(run, past.acknowledged_by)
    key = {name: getattr(past, name) for name in ALERT_KEY}
    stored, created = Alert.objects.get_or_create(run=run, **key, defaults=fields)
    if created:
        HistoryEntry.objects.bulk_create(
            HistoryEntry(event=stored, user=_person(run, entry.user_name), **entry.model_dump())
            for entry in past.history
        )
    run_changed(run.id, run.project_id, "alert", past.step)


def store_command(run: Run, command: PastCommand) -> None:
    """Store an imported command as expired.

    Raises:
        InvalidError: if the run has too many.
    """
    _check_room(Command.objects.filter(run=run).count(), "commands")
    fields = command.model_dump(exclude={"given_by", "alert", "results"})
    fields["expires_at"] = min(command.expires_at, timezone.now())
    fields["given_by"] = _person(run, command.given_by)
    if command.alert is not None:
        fields["event"] = Alert.objects.filter(run=run, **command.alert.model_dump()).first()
    stored = Command.objects.create(run=run, **fields)
    CommandResult.objects.bulk_create(
        CommandResult(command=stored, **result.model_dump()) for result in command.results
    )
    run_changed(run.id, run.project_id, "command")


def notes_of(run_id: UUID) -> Iterator[tuple[int, dict[str, Any]]]:
    """The run's note with step 0, if there is one, then the notes at its steps."""
    note = notes.note_of(run_id)
    if note is not None:
        yield 0, {**note, "edited_at": note["edited_at"].isoformat()}
    for pinned in notes.step_notes_of(run_id):
        document = {"text": pinned["text"], "edited_by": pinned["written_by"], "step": pinned["step"]}
        yield pinned["step"], {**document, "edited_at": pinned["written_at"].isoformat()}


def artefacts_of(run_id: UUID) -> Iterator[tuple[int, dict[str, Any]]]:
    """The run's links, in the order in which they were added, each with its step or 0."""
    for artefact in notes.artefacts_of(run_id):
        yield artefact["step"] or 0, {**artefact, "added_at": artefact["added_at"].isoformat()}


def store_note(run: Run, text: str, edited_by: str, edited_at: datetime) -> None:
    """Store an imported note, unless the run has one."""
    values = {"text": text, "version": 1, "edited_by": _person(run, edited_by), "edited_at": edited_at}
    Note.objects.get_or_create(run=run, defaults=values)


def store_step_note(run: Run, step: int, text: str, written_by: str, written_at: datetime) -> None:
    """Store an imported note at a step.

    Raises:
        InvalidError: if the run has too many.
    """
    if StepNote.objects.filter(run=run).count() >= notes.MAX_STEP_NOTES:
        raise InvalidError(f"The run has {notes.MAX_STEP_NOTES} notes at steps.", "No more can be imported.")
    values = {"written_by": _person(run, written_by), "written_at": written_at}
    StepNote.objects.create(run=run, step=step, text=text[: notes.STEP_NOTE_LENGTH], **values)
    run_changed(run.id, run.project_id, "note", step)


def artefact(
    run: Run, name: str, address: str, step: int | None, added_by: str, added_at: datetime
) -> NewArtefact:
    """An imported link. A person of another server is nobody here."""
    return NewArtefact(name=name, address=address, step=step, user=_person(run, added_by), added_at=added_at)


def _check_room(count: int, what: str) -> None:
    if count >= MAX_RECORDS:
        raise InvalidError(f"The run has {MAX_RECORDS} {what}.", "No more can be imported.")


def _person(run: Run, name: str) -> User | None:
    """The member of the run's project with this name. Outside of the project it may be another person's."""
    if not name:
        return None
    return User.objects.filter(username=name, memberships__project=run.project_id).first()


def _name_of(user: User | None) -> str:
    return "" if user is None else user.username


def _as_json(value: float | None) -> float | str | None:
    return None if value is None else json_number(value)


def _times(row: Any, *names: str) -> dict[str, str | None]:
    moments: dict[str, datetime | None] = {name: getattr(row, name) for name in names}
    return {name: None if at is None else at.isoformat() for name, at in moments.items()}
