"""Commands on the page of a run: permissions, the form, and the state of each command."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import send_report
from dashboard.helpers.visitors import Visitor, run_html
from django.test import Client

from fp8scope_dashboard.control import commands
from fp8scope_dashboard.control.models import Command
from fp8scope_dashboard.pages.live.views import fingerprint_of
from fp8scope_dashboard.runs.models import Run, RunState

FORM = {
    "kind": "fallback",
    "patterns": "blocks.*.up, blocks.1.down",
    "precision": "bf16",
    "reason": "it clips",
}


@pytest.fixture
def writer(admin: Visitor) -> Recorder:
    recorder = Recorder(run=make_run(admin.project), tensors=["blocks.0.up.input", "blocks.1.down.input"])
    send_report(recorder, kind="accepts", accepts=["checkpoint", "fallback", "pause", "resume"])
    return recorder


def submit(visitor: Visitor, run: Run, **form: Any) -> str:
    """Submit the form; returns the page that follows."""
    address = visitor.address(f"runs/{run.id}/commands/new")
    return visitor.client.post(address, form, follow=True).content.decode()


def test_it_works(member: Visitor, writer: Recorder) -> None:
    shown = run_html(member, writer.run)
    assert 'id="commands-title">Commands<' in shown and '<option value="blocks.0.up">' in shown
    answer = submit(member, writer.run, **FORM)
    assert "Command created: change precision" in answer
    (command,) = Command.objects.all()
    assert command.arguments == {"patterns": ["blocks.*.up", "blocks.1.down"], "precision": "bf16"}
    assert (command.given_by, command.reason) == (member.user, "it clips")
    assert "blocks.*.up, blocks.1.down to BF16" in answer and "it clips" in answer and "Waiting" in answer
    commands.commands_for(writer.run, writer.uuid, 0)
    assert "Delivered" in run_html(member, writer.run)
    send_report(writer, kind="command", command=command.pk, state="done", message="2 of 2 layers", step=12)
    part = run_html(member, writer.run, "commands")
    assert "Done" in part and "2 of 2 layers" in part and "step 12" in part and "<html" not in part


@pytest.mark.parametrize(
    ("form", "kind", "arguments"),
    [
        ({"kind": "checkpoint"}, "checkpoint", {}),
        ({"kind": "pause", "minutes": "2.5"}, "pause", {"seconds": 150}),
        ({"kind": "pause"}, "pause", {"seconds": 600}),
        ({"kind": "resume"}, "resume", {}),
    ],
    ids=str,
)
def test_other_commands(
    member: Visitor, writer: Recorder, form: dict[str, str], kind: str, arguments: dict[str, Any]
) -> None:
    submit(member, writer.run, **form)
    (command,) = Command.objects.all()
    assert (command.kind, command.arguments) == (kind, arguments)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "There is no command"),
        ({"kind": "explode"}, "There is no command"),
        ({"kind": "fallback", "patterns": " , "}, "Name 1 to 100 layers"),
        ({"kind": "fallback", "patterns": "a", "precision": "fp4"}, "The precision is bf16"),
        ({"kind": "pause", "minutes": "soon"}, "The duration of a pause"),
        ({"kind": "pause", "minutes": "1e999"}, "The duration of a pause"),
        ({"kind": "pause", "minutes": "61"}, "A pause lasts"),
    ],
    ids=str,
)
def test_an_invalid_form_gets_a_message(
    member: Visitor, writer: Recorder, form: dict[str, str], message: str
) -> None:
    assert message in submit(member, writer.run, **form)
    assert not Command.objects.exists()


def test_only_members_can_give_commands(viewer: Visitor, stranger: Visitor, writer: Recorder) -> None:
    address = viewer.address(f"runs/{writer.run.id}/commands/new")
    assert viewer.client.post(address, FORM).status_code == 403
    assert stranger.client.post(address, FORM).status_code == 404
    assert Client().post(address, FORM).status_code == 302
    assert viewer.client.get(address).status_code == 405
    assert not Command.objects.exists()
    shown = run_html(viewer, writer.run)
    assert "Change precision" not in shown and "No commands yet" in shown


def test_the_form_needs_a_csrf_token(member: Visitor, writer: Recorder) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(member.user)
    answer = strict.post(member.address(f"runs/{writer.run.id}/commands/new"), FORM)
    assert answer.status_code == 403 and not Command.objects.exists()


def test_offers_only_the_commands_that_the_run_accepts(member: Visitor, writer: Recorder) -> None:
    send_report(writer, kind="accepts", accepts=["fallback"])
    shown = run_html(member, writer.run)
    assert "Change precision" in shown and "Write a checkpoint" not in shown and "Pause" not in shown
    send_report(writer, kind="accepts", accepts=[])
    assert "accepts no commands yet" in run_html(member, writer.run)


def test_a_finished_run_shows_its_commands_without_the_form(member: Visitor, writer: Recorder) -> None:
    commands.give(writer.run, "checkpoint", user=member.user)
    Run.objects.update(state=RunState.FINISHED)
    shown = run_html(member, writer.run)
    assert "Write a checkpoint</td>" in shown and "Change precision" not in shown
    Command.objects.all().delete()
    assert 'id="commands"' in run_html(member, writer.run), (
        "the card is still there, hidden, for later commands"
    )


def test_every_change_of_a_command_changes_the_fingerprint(member: Visitor, writer: Recorder) -> None:
    runs = Run.objects.filter(pk=writer.run.pk)
    fingerprints = [fingerprint_of(runs)["command"]]
    command = commands.give(writer.run, "checkpoint")
    fingerprints.append(fingerprint_of(runs)["command"])
    commands.commands_for(writer.run, writer.uuid, 0)
    fingerprints.append(fingerprint_of(runs)["command"])
    send_report(writer, kind="command", command=command.pk, state="done")
    fingerprints.append(fingerprint_of(runs)["command"])
    send_report(writer, kind="accepts", accepts=[])
    fingerprints.append(fingerprint_of(runs)["command"])
    assert len({repr(fingerprint) for fingerprint in fingerprints}) == 5


def page_of(visitor: Visitor, rest: str) -> str:
    return visitor.client.get(visitor.address(rest)).content.decode()
