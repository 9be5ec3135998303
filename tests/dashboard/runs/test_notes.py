"""Notes and links to artefacts of a run."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import make_run
from django.db import IntegrityError, transaction

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.runs.models import Artefact, Note, Run, StepNote
from fp8scope_dashboard.runs.notes import (
    ADDRESS_LENGTH,
    MAX_ARTEFACTS,
    MAX_STEP_NOTES,
    NoteConflictError,
    NoteError,
    add_artefact,
    add_step_note,
    check_address,
    save_note,
    step_notes_of,
)
from fp8scope_dashboard.text.markdown import MAX_CHARACTERS


@pytest.fixture
def run(db: None) -> Run:
    return make_run(create_project("research", "Research"), "r")


@pytest.fixture
def user(db: None) -> User:
    return User.objects.create_user("ada")


def test_it_works(run: Run, user: User) -> None:
    note = save_note(run, " Frozen at 127.\r\nLook at the margin. ", 0, user)
    assert (note.text, note.version, note.edited_by) == ("Frozen at 127.\nLook at the margin.", 1, user)
    again = save_note(run, "Solved.", note.version, user)
    assert again.version == 2 and Note.objects.get().text == "Solved."


def test_two_people_do_not_overwrite_each_other(run: Run, user: User) -> None:
    save_note(run, "Mine.", 0, user)
    for version in (0, 2):
        with pytest.raises(NoteConflictError, match="Somebody else"):
            save_note(run, "Theirs.", version, user)
    assert Note.objects.get().text == "Mine."


def test_a_note_has_a_limit(run: Run, user: User) -> None:
    save_note(run, "x" * MAX_CHARACTERS, 0, user)
    with pytest.raises(NoteError, match="20,001 characters"):
        save_note(run, "x" * (MAX_CHARACTERS + 1), 1, user)
    assert "\x00" not in save_note(run, "a\x00b", 1, user).text


def test_adds_links(run: Run, user: User) -> None:
    added = add_artefact(run, " Checkpoint ", " s3://bucket/run/step-10 ", user)
    assert (added.name, added.address, added.added_by) == ("Checkpoint", "s3://bucket/run/step-10", user)
    assert not added.is_web and add_artefact(run, "", "https://x.test/log.txt", user).is_web
    # Without a name, the last part of the address is the name.
    assert list(Artefact.objects.values_list("name", flat=True)) == ["Checkpoint", "log.txt"]
    with pytest.raises(NoteError, match="already"):
        add_artefact(run, "again", "s3://bucket/run/step-10", user)
    assert add_artefact(run, "", "https://x.test/", user).name == "https://x.test/"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "bucket/x",
        "javascript:alert(1)",
        "JAVASCRIPT://x/%0aalert(1)",
        "ftp://host/x",
        "https://",
        "s3:bucket",
        "https://x.test/a b",
        "https://x.test/\u202egnp.exe",
        "https://[x",
        "https://x.test/\n",
        "https://x.test/" + "a" * ADDRESS_LENGTH,
    ],
)
def test_refuses_other_addresses(address: str) -> None:
    with pytest.raises(NoteError):
        check_address(address)


def test_a_run_has_a_limited_number_of_links(run: Run, user: User) -> None:
    for i in range(MAX_ARTEFACTS):
        Artefact.objects.create(run=run, name=str(i), address=f"gs://bucket/{i}")
    with pytest.raises(NoteError, match=f"at most {MAX_ARTEFACTS}"):
        add_artefact(run, "one more", "gs://bucket/more", user)


def test_a_link_is_stored_once(run: Run) -> None:
    Artefact.objects.create(run=run, name="a", address="gs://bucket/a")
    with pytest.raises(IntegrityError), transaction.atomic():
        Artefact.objects.create(run=run, name="b", address="gs://bucket/a")


def test_notes_at_steps_have_limits(run: Run, user: User) -> None:
    assert add_step_note(run, 2**62, " x\r\ny ", user).text == "x\ny"
    for step, text in ((None, "x"), (-1, "x"), (2**62 + 1, "x"), (1, " \n"), (1, "x" * 1_001)):
        with pytest.raises(NoteError):
            add_step_note(run, step, text, user)
    StepNote.objects.bulk_create(StepNote(run=run, step=step, text="x") for step in range(MAX_STEP_NOTES - 1))
    with pytest.raises(NoteError, match="at most 1,000 notes"):
        add_step_note(run, 1, "One more.", user)
    assert step_notes_of(run.id)[-1]["written_by"] == "ada"
