"""Additions of people to a run: a note, notes at its steps, and links to its artefacts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import UUID

from django.db import IntegrityError, transaction
from django.utils import timezone

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Artefact, Note, Run, StepNote
from fp8scope_dashboard.text.markdown import MAX_CHARACTERS

MAX_ARTEFACTS: Final = 500
MAX_STEP_NOTES: Final = 1_000
STEP_NOTE_LENGTH: Final = 1_000
MAX_STEP: Final = 2**62
NAME_LENGTH: Final = 128
ADDRESS_LENGTH: Final = 1_000
SCHEMES: Final = ("http", "https", "s3", "gs", "file")


class NoteError(ValueError):
    """The note or the link cannot be saved; the message says what to change."""


class NoteConflictError(NoteError):
    """Somebody else has changed the note since it was read."""


def save_note(run: Run, text: str, version: int, user: User) -> Note:
    """Replace the note of a run.

    Args:
        version: of the note that was edited, 0 if there was none.

    Raises:
        NoteConflictError: the note has another version by now.
        NoteError: the text is too long.
    """
    # A form sends line ends as CRLF.
    text = text.replace("\r\n", "\n").replace("\x00", "").strip()
    if len(text) > MAX_CHARACTERS:
        raise NoteError(f"The note has {len(text):,} characters; at most {MAX_CHARACTERS:,} are possible.")
    values = {"text": text, "version": version + 1, "edited_by": user, "edited_at": timezone.now()}
    with transaction.atomic():
        Note.objects.get_or_create(run=run)
        # One statement, so that of two people who save at once one gets the conflict.
        if Note.objects.filter(run=run, version=version).update(**values) != 1:
            raise NoteConflictError(
                "Somebody else has changed the note in the meantime. Your text is below: merge the two, and "
                "save again."
            )
    return Note.objects.select_related("edited_by").get(run=run)


def add_step_note(run: Run, step: int | None, text: str, user: User | None) -> StepNote:
    """Pin a note to a step of a run.

    Raises:
        NoteError: the step or the text is invalid, or the run has MAX_STEP_NOTES.
    """
    at, said = _checked(step, text)
    with transaction.atomic():
        Run.objects.select_for_update().only("id").get(pk=run.pk)
        if StepNote.objects.filter(run=run).count() >= MAX_STEP_NOTES:
            raise NoteError(f"A run has at most {MAX_STEP_NOTES:,} notes at steps: remove one first.")
        note = StepNote.objects.create(run=run, step=at, text=said, written_by=user)
    run_changed(run.id, run.project_id, "note", at)
    return note


def change_step_note(note: StepNote, step: int | None, text: str, user: User) -> None:
    """Replace the step and the text of a note, and its author by the person who did so.

    Raises:
        NoteError: the step or the text is invalid.
    """
    note.step, note.text = _checked(step, text)
    note.written_by, note.written_at = user, timezone.now()
    note.save(update_fields=["step", "text", "written_by", "written_at"])
    run_changed(note.run_id, note.run.project_id, "note", note.step)


def remove_step_note(note: StepNote) -> None:
    """Remove a note at a step."""
    run_id, project_id, step = note.run_id, note.run.project_id, note.step
    note.delete()
    run_changed(run_id, project_id, "note", step)


def _checked(step: int | None, text: str) -> tuple[int, str]:
    """The step and the text of a note at a step."""
    # A form sends line ends as CRLF.
    text = text.replace("\r\n", "\n").replace("\x00", "").strip()
    if not text:
        raise NoteError("Write what the note says.")
    if len(text) > STEP_NOTE_LENGTH:
        raise NoteError(f"The note has {len(text):,} characters; at most {STEP_NOTE_LENGTH:,} are possible.")
    if step is None or not 0 <= step <= MAX_STEP:
        raise NoteError("A step is a whole number from 0 on.")
    return step, text


def add_artefact(run: Run, name: str, address: str, user: User) -> Artefact:
    """Add a link to a run.

    Raises:
        NoteError: the link is invalid or known, or the run has MAX_ARTEFACTS.
    """
    name, address = name.strip(), address.strip()
    checked = check_address(address)
    if len(name) > NAME_LENGTH:
        raise NoteError(f"The name of a link has at most {NAME_LENGTH} characters.")
    with transaction.atomic():
        _check_room(run)
        try:
            with transaction.atomic():
                artefact = Artefact.objects.create(
                    run=run, name=name or checked.rsplit("/", 1)[-1][:NAME_LENGTH] or checked[:NAME_LENGTH],
                    address=checked, added_by=user,
                )  # fmt: skip
        except IntegrityError:
            raise NoteError("The run has this link already.") from None
    return artefact


@dataclass(frozen=True, kw_only=True)
class NewArtefact:
    """A link that a training script has sent, or that is imported. `writer`: the process that sent it."""

    name: str
    address: str
    step: int | None = None
    writer: UUID | None = None
    user: User | None = None
    added_at: datetime | None = None


@transaction.atomic
def put_artefact(run: Run, artefact: NewArtefact) -> None:
    """Add a link to a run. If the run has its address already, name and step are replaced.

    Raises:
        NoteError: the link is invalid, or the run has MAX_ARTEFACTS.
    """
    address = check_address(artefact.address.strip())
    values: dict[str, Any] = {
        "name": artefact.name[:NAME_LENGTH],
        "step": artefact.step,
        "writer": artefact.writer,
    }
    values |= {"added_at": artefact.added_at or timezone.now()}
    if not Artefact.objects.filter(run=run, address=address).update(**values):
        _check_room(run)
        Artefact.objects.create(run=run, address=address, added_by=artefact.user, **values)


def _check_room(run: Run) -> None:
    Run.objects.select_for_update().only("id").get(pk=run.pk)
    if Artefact.objects.filter(run=run).count() >= MAX_ARTEFACTS:
        raise NoteError(f"A run has at most {MAX_ARTEFACTS} links: remove one first.")


def note_of(run_id: UUID) -> dict[str, Any] | None:
    """The note of a run with its author, as JSON types but for the time; None without one."""
    note = Note.objects.filter(run_id=run_id).exclude(text="").select_related("edited_by").first()
    if note is None:
        return None
    return {"text": note.text, "edited_by": _name_of(note.edited_by), "edited_at": note.edited_at}


def step_notes_of(run_id: UUID) -> list[dict[str, Any]]:
    """The notes at steps of a run by step, as JSON types but for the time."""
    notes = StepNote.objects.filter(run_id=run_id).select_related("written_by")
    return [
        {
            "step": note.step, "text": note.text, "written_by": _name_of(note.written_by),
            "written_at": note.written_at,
        }
        for note in notes
    ]  # fmt: skip


def artefacts_of(run_id: UUID) -> list[dict[str, Any]]:
    """The links of a run in the order in which they were added, as JSON types but for the time."""
    return [
        {
            "name": artefact.name, "address": artefact.address, "step": artefact.step,
            "added_by": _name_of(artefact.added_by), "added_at": artefact.added_at,
        }
        for artefact in Artefact.objects.filter(run_id=run_id).select_related("added_by")
    ]  # fmt: skip


def _name_of(user: User | None) -> str:
    return "" if user is None else user.username


def check_address(address: str) -> str:
    """The address, if it may be linked.

    Raises:
        NoteError: it is not an address of SCHEMES with a host, or too long.
    """
    try:
        parts = urlsplit(address)
        has_place = bool(parts.netloc) or (parts.scheme.lower() == "file" and len(parts.path) > 1)
        valid = parts.scheme.lower() in SCHEMES and has_place and address.isprintable()
    except ValueError:
        valid = False
    if not valid or any(character.isspace() for character in address):
        raise NoteError("A link begins with http://, https://, s3://, gs:// or file://, and has no spaces.")
    if len(address) > ADDRESS_LENGTH:
        raise NoteError(f"A link has at most {ADDRESS_LENGTH:,} characters.")
    return address
