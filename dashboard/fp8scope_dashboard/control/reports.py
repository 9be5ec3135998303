"""Store the reports of a run, each message once."""

from __future__ import annotations

from uuid import UUID

from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.control import imported_history, schemas
from fp8scope_dashboard.control.commands import UnknownCommandError, note_result
from fp8scope_dashboard.control.models import Listener, Report
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.receipts import dedup
from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.notes import NewArtefact, NoteError, put_artefact
from fp8scope_dashboard.wire.errors import InvalidError

# One reference window per minute for a week.
MAX_REPORTS = 10_000
ENVELOPE = {"writer", "seq", "step", "kind"}
PAST = schemas.PastAlertIn | schemas.PastCommandIn | schemas.PastNoteIn | schemas.PastArtefactIn


@transaction.atomic
def store(run: Run, message: dedup.MessageId, body: schemas.ReportIn) -> bool:
    """Store a report, a command's result, the accepted commands, or an imported alert or command.

    Returns False if the message was stored before.

    Raises:
        WriterConflictError: if another message has this seq.
        InvalidError: if the run has too many reports or no such command, or an alert or command comes from a
            process that does not import a run.
    """
    writer = runs.writer_of(run, message.writer)
    if not dedup.record(message):
        return False
    runs.note_contact(run, writer)
    if isinstance(body, schemas.CommandResultIn):
        _store_result(run, message.writer, body)
    elif isinstance(body, schemas.AcceptsIn):
        values = {"accepts": sorted(set(body.accepts)), "at": timezone.now()}
        Listener.objects.update_or_create(run=run, writer=message.writer, defaults=values)
        run_changed(run.id, run.project_id, "command", body.step)
    elif isinstance(body, schemas.ConsoleIn):
        console.store(run, writer, [console.NewLine(**line.model_dump()) for line in body.lines])
    elif isinstance(body, schemas.AnnotationIn) and body.artefact is not None:
        link = body.artefact
        _store_artefact(
            run, NewArtefact(name=link.name, address=link.address, step=body.step, writer=message.writer)
        )
    elif isinstance(body, PAST):
        if not writer.imported:
            raise InvalidError(
                "This process is not an import.",
                "Only `fp8scope import` may send what people and the server added to a run.",
            )
        if isinstance(body, schemas.PastNoteIn):
            _store_note(run, body.note)
        elif isinstance(body, schemas.PastArtefactIn):
            _store_artefact(run, imported_history.artefact(run, **body.artefact.model_dump()))
        elif isinstance(body, schemas.PastAlertIn):
            imported_history.store_alert(run, body.alert)
        else:
            imported_history.store_command(run, body.command)
    else:
        _store_report(run, message, body)
    return True


def _store_note(run: Run, note: schemas.PastNote) -> None:
    if note.step is None:
        imported_history.store_note(run, note.text, note.edited_by, note.edited_at)
    else:
        imported_history.store_step_note(run, note.step, note.text, note.edited_by, note.edited_at)


def _store_artefact(run: Run, artefact: NewArtefact) -> None:
    try:
        put_artefact(run, artefact)
    except NoteError as error:
        raise InvalidError(f"The artefact cannot be linked: {error}", "Check its name and address.") from None
    run_changed(run.id, run.project_id, "report", artefact.step)


def _store_result(run: Run, writer: UUID, body: schemas.CommandResultIn) -> None:
    try:
        note_result(run, writer, body.command, body.state, body.message, body.step)
    except UnknownCommandError:
        raise InvalidError(
            f"The run has no command {body.command}.", "Report results only of commands that the server sent."
        ) from None
    run_changed(run.id, run.project_id, "command", body.step)


def _store_report(
    run: Run, message: dedup.MessageId, body: schemas.BisectIn | schemas.ReferenceIn | schemas.AnnotationIn
) -> None:
    if Report.objects.filter(run=run).count() >= MAX_REPORTS:
        raise InvalidError(f"The run has {MAX_REPORTS} reports.", "Report less often.")
    document = body.model_dump(mode="json", exclude=ENVELOPE)
    for optional in ("incident", "artefact"):
        if document.get(optional) is None:
            document.pop(optional, None)
    Report.objects.create(
        run=run,
        writer=message.writer,
        seq=message.seq,
        kind=body.kind,
        step=body.step,
        document=document,
    )
    run_changed(run.id, run.project_id, "report", body.step)
