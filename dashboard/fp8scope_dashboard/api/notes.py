"""Notes at steps of a run, written by programs."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.db import transaction
from django.http import HttpRequest
from ninja import Field, Router, Schema, Status

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.api.auth import WRITER, run_of, token_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.runs import services
from fp8scope_dashboard.runs.notes import MAX_STEP, STEP_NOTE_LENGTH, NoteError, add_step_note
from fp8scope_dashboard.wire import schemas
from fp8scope_dashboard.wire.errors import InvalidError

router = Router(tags=["notes"], auth=WRITER)


class StepNoteIn(Schema):
    """A note at a step, as plain text."""

    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    text: Annotated[str, Field(min_length=1, max_length=STEP_NOTE_LENGTH)]


class WrittenStepNote(schemas.StepNoteOut):
    """A stored note; `written_by` is the person who made the token, and `url` shows the note."""

    url: str


@router.post("/runs/{run}/step_notes", response={201: WrittenStepNote, ERRORS: schemas.ErrorOut})
def write_step_note(request: HttpRequest, run: UUID, body: StepNoteIn) -> Status[dict[str, Any]]:
    """Pin a note to a step of a run; its charts mark it. The audit log has the token that wrote it."""
    stored, author = run_of(request, run), token_of(request).created_by
    try:
        with transaction.atomic():
            note = add_step_note(stored, body.step, body.text, author)
            text = f"at step {note.step:,} of the run “{stored.name}”"
            record(actor_of(request), stored.project, Action.NOTE, text, run=str(stored.pk))
    except NoteError as error:
        raise InvalidError(str(error), "Shorten the note, or remove one on the run's page.") from None
    page = services.page_url(stored, server_address(request))
    return Status(
        201,
        {
            "step": note.step,
            "text": note.text,
            "written_by": "" if author is None else author.get_username(),
            "written_at": note.written_at,
            "url": f"{page}?tab=notes#{note.anchor}",
        },
    )
