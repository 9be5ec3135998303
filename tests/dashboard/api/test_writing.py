"""What programs write: notes at steps, and commands."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.visitors import visitor_of
from django.test import Client

from fp8scope_dashboard.accounts.models import Project, Role, Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.audit.models import Action, Entry
from fp8scope_dashboard.control.models import Command, Listener
from fp8scope_dashboard.runs.models import Run, RunState, StepNote
from fp8scope_dashboard.runs.notes import MAX_STEP_NOTES, STEP_NOTE_LENGTH

pytestmark = pytest.mark.django_db


@pytest.fixture
def project() -> Project:
    return create_project("research", "Research")


@pytest.fixture
def run(project: Project) -> Run:
    """A running run whose script accepts to pause."""
    run = make_run(project, "a run")
    Listener.objects.create(run=run, writer=uuid.uuid4(), accepts=["pause"])
    return run


def post(client: Client, run: Run | uuid.UUID, path: str, body: Any) -> tuple[int, Any]:
    key = run.pk if isinstance(run, Run) else run
    answer = client.post(f"/api/v1/runs/{key}/{path}", body, content_type="application/json")
    return answer.status_code, answer.json()


def test_it_works(project: Project, run: Run) -> None:
    status, note = post(client_with_token(project), run, "step_notes", {"step": 7, "text": " a\r\nb "})
    assert status == 201 and (note["step"], note["text"], note["written_by"]) == (7, "a\nb", "")
    stored = StepNote.objects.get()
    assert note["url"].endswith(f"/p/research/runs/{run.pk}/?tab=notes#{stored.anchor}")
    viewer = visitor_of(project, "vic", Role.VIEWER)
    page = viewer.client.get(viewer.address(f"runs/{run.pk}/"), {"tab": "notes"}).content.decode()
    assert f'id="{stored.anchor}"' in page
    client = client_with_token(project, Scope.ADMINISTER)
    status, command = post(
        client, run, "commands", {"kind": "pause", "arguments": {"seconds": 5}, "reason": "r"}
    )
    assert status == 201 and command["id"] == Command.objects.get().pk
    assert (command["kind"], command["arguments"], command["state"]) == ("pause", {"seconds": 5}, "waiting")
    history = client.get(f"/api/v1/runs/{run.pk}/history").json()
    assert history["accepts"] == ["pause"] and history["commands"] == [command]
    first, second = Entry.objects.order_by("id")
    assert (first.action, first.text) == (Action.NOTE, "at step 7 of the run “a run”")
    assert (second.action, second.text) == (Action.COMMAND, "pause, to the run “a run”")
    assert first.token is not None and "token “tests”" in first.by
    admin = visitor_of(project, "ada", Role.ADMIN)
    page = admin.client.get(admin.address("settings/")).content.decode()
    assert "Wrote a note" in page and "at step 7 of the run" in page


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"step": -1, "text": "x"}, "step"),
        ({"step": 2**63, "text": "x"}, "step"),
        ({"step": 1.5, "text": "x"}, "step"),
        ({"step": 1}, "text"),
        ({"step": 1, "text": ""}, "text"),
        ({"step": 1, "text": " \n\0 "}, "Write what the note says."),
        ({"step": 1, "text": "x" * (STEP_NOTE_LENGTH + 1)}, "text"),
        ("no object", "JSON"),
    ],
    ids=str,
)
def test_notes_that_are_refused(project: Project, run: Run, body: Any, text: str) -> None:
    status, answer = post(client_with_token(project), run, "step_notes", body)
    assert status in (400, 422) and (text in answer["error"]["message"] or status == 400)
    assert answer["error"]["hint"] and not StepNote.objects.exists() and not Entry.objects.exists()


def test_a_run_has_a_bounded_number_of_notes(project: Project, run: Run) -> None:
    StepNote.objects.bulk_create(StepNote(run=run, step=step, text="x") for step in range(MAX_STEP_NOTES))
    status, answer = post(client_with_token(project), run, "step_notes", {"step": 1, "text": "x"})
    assert status == 422 and "at most 1,000 notes" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"kind": "stop"}, "There is no command 'stop'."),
        ({"kind": "x" * 100}, "kind"),
        ({"kind": "checkpoint"}, "does not accept this command"),
        ({"kind": "pause", "arguments": {"seconds": 0}}, "A pause lasts"),
        ({"kind": "pause", "arguments": []}, "arguments"),
        ({"kind": "pause", "reason": "x" * 501}, "reason"),
        ({}, "kind"),
    ],
    ids=str,
)
def test_commands_that_are_refused(project: Project, run: Run, body: Any, text: str) -> None:
    status, answer = post(client_with_token(project, Scope.ADMINISTER), run, "commands", body)
    assert status == 422 and text in answer["error"]["message"] and answer["error"]["hint"]
    assert not Command.objects.exists() and not Entry.objects.exists()


def test_a_run_that_is_over_takes_no_command(project: Project, run: Run) -> None:
    Run.objects.update(state=RunState.FINISHED)
    client = client_with_token(project, Scope.ADMINISTER)
    status, answer = post(client, run, "commands", {"kind": "pause"})
    assert status == 422 and "finished" in answer["error"]["message"]
    assert answer["error"]["hint"] == "The run accepts now: none."
    assert client.get(f"/api/v1/runs/{run.pk}/history").json()["accepts"] == []


@pytest.mark.parametrize(
    ("path", "body"), [("step_notes", {"step": 1, "text": "x"}), ("commands", {"kind": "pause"})]
)
def test_a_token_of_another_project_writes_nothing(run: Run, path: str, body: Any) -> None:
    client = client_with_token(create_project("elsewhere", "Elsewhere"), *Scope)
    assert post(client, run, path, body)[0] == 404
    assert post(client, uuid.uuid4(), path, body)[0] == 404
    assert not Command.objects.exists() and not StepNote.objects.exists()


def test_a_training_gives_no_commands(project: Project, run: Run) -> None:
    status, answer = post(client_with_token(project, Scope.WRITE), run, "commands", {"kind": "pause"})
    assert status == 403 and answer["error"]["code"] == "forbidden" and not Command.objects.exists()
