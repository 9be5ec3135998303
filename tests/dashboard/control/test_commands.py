"""Commands: who may give them, which writers get them, and the state that results give them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from dashboard.helpers.recording import Recorder
from dashboard.helpers.reporting import another, send_report
from django.utils import timezone

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.alerts.alert_updates import Detection, apply
from fp8scope_dashboard.alerts.detectors import ConditionChange
from fp8scope_dashboard.alerts.models import Rule, RuleAction
from fp8scope_dashboard.control import commands
from fp8scope_dashboard.control.models import Command
from fp8scope_dashboard.runs.models import Run, RunState, Writer
from fp8scope_dashboard.wire.errors import InvalidError

UP = {"patterns": ["blocks.*.up"], "precision": "bf16"}


def ids(writer: Recorder, after: int = 0) -> list[int]:
    return [command["id"] for command in commands.commands_for(writer.run, writer.uuid, after)]


def state(command: Command) -> str:
    command.refresh_from_db()
    return commands.state_of(command, command.results.all())


def answer(writer: Recorder, command: Command, state: str, message: str = "", step: int = 7) -> None:
    send_report(writer, kind="command", command=command.pk, state=state, message=message, step=step)


def age(command: Command, **by: float) -> None:
    moved = {
        "given_at": command.given_at - timedelta(**by),
        "expires_at": command.expires_at - timedelta(**by),
    }
    Command.objects.filter(pk=command.pk).update(**moved)


def test_it_works(listening: Recorder) -> None:
    user = User.objects.create_user("ada")
    command = commands.give(listening.run, "fallback", UP, user=user, reason="saturation")
    assert state(command) == "waiting"
    (received,) = commands.commands_for(listening.run, listening.uuid, 0)
    assert received["expires_in"] == pytest.approx(commands.LIFETIME.total_seconds(), abs=30)
    assert {key: received[key] for key in ("id", "kind", "arguments", "reason", "given_by")} == {
        "id": command.pk,
        "kind": "fallback",
        "arguments": UP,
        "reason": "saturation",
        "given_by": "ada",
    }
    assert state(command) == "delivered"
    answer(listening, command, "done", "2 layers")
    assert state(command) == "done" and ids(listening) == []
    (result,) = command.results.all()
    assert (result.writer, result.message, result.step) == (listening.uuid, "2 layers", 7)


def test_a_command_is_repeated_until_answered_or_known(listening: Recorder) -> None:
    first, second = (commands.give(listening.run, "checkpoint") for _ in range(2))
    assert ids(listening) == ids(listening) == [first.pk, second.pk]
    assert ids(listening, after=first.pk) == [second.pk]
    answer(listening, first, "done")
    assert ids(listening) == [second.pk]


def test_every_rank_gets_a_command_and_reports_its_result(listening: Recorder) -> None:
    other = another(listening.run)
    command = commands.give(listening.run, "fallback", UP)
    assert ids(listening) == ids(other) == [command.pk]
    answer(listening, command, "done")
    assert ids(other) == [command.pk] and ids(listening) == []
    answer(other, command, "refused", "no layer of that name")
    assert state(command) == "refused" and command.results.count() == 2


def test_a_later_process_does_not_repeat_answered_commands(listening: Recorder) -> None:
    """A resumed run must not repeat a checkpoint that an earlier process has written."""
    done, waiting = (commands.give(listening.run, "checkpoint") for _ in range(2))
    answer(listening, done, "done")
    later = another(listening.run)
    Writer.objects.filter(uuid=later.uuid).update(created_at=timezone.now() + timedelta(seconds=1))
    assert ids(later) == [waiting.pk]


def test_a_late_result_does_not_replace_a_final_one(listening: Recorder) -> None:
    command = commands.give(listening.run, "pause", {"seconds": 5})
    answer(listening, command, "accepted", "paused", 3)
    assert state(command) == "accepted"
    answer(listening, command, "done", "resumed", 3)
    answer(listening, command, "accepted", "paused", 3)
    assert state(command) == "done" and command.results.get().message == "resumed"


def test_a_command_expires(listening: Recorder) -> None:
    command = commands.give(listening.run, "checkpoint")
    age(command, minutes=16)
    assert ids(listening) == [] and state(command) == "expired"
    # The late result of a command that was delivered in time still counts.
    answer(listening, command, "done")
    assert state(command) == "done"


@pytest.mark.parametrize("over", [RunState.FINISHED, RunState.FAILED])
def test_a_run_that_is_over_accepts_no_command(listening: Recorder, over: RunState) -> None:
    listening.run.state = over
    with pytest.raises(commands.CommandError, match="no process can"):
        commands.give(listening.run, "checkpoint")


def test_refuses_commands_that_the_script_does_not_accept(run: Run, writer: Recorder) -> None:
    with pytest.raises(commands.CommandError, match="allow_pause"):
        commands.give(run, "pause")
    send_report(writer, kind="accepts", accepts=["fallback"])
    assert commands.accepted_kinds(run) == {"fallback"}
    commands.give(run, "fallback", UP)
    with pytest.raises(commands.CommandError, match="on_command"):
        commands.give(run, "checkpoint")
    send_report(writer, kind="accepts", accepts=[])
    with pytest.raises(commands.CommandError, match="watch"):
        commands.give(run, "fallback", UP)


def test_a_finished_process_accepts_no_command(listening: Recorder) -> None:
    Writer.objects.filter(uuid=listening.uuid).update(finished_at=timezone.now())
    assert commands.accepted_kinds(listening.run) == set()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("explode", {}, "no command"),
        ("fallback", {}, "Name 1 to"),
        ("fallback", {"patterns": []}, "Name 1 to"),
        ("fallback", {"patterns": "blocks"}, "Name 1 to"),
        ("fallback", {"patterns": ["a"] * 101}, "Name 1 to"),
        ("fallback", {"patterns": [""]}, "1 to 512"),
        ("fallback", {"patterns": ["x" * 513]}, "1 to 512"),
        ("fallback", {"patterns": ["a\0"]}, "1 to 512"),
        ("fallback", {"patterns": [3]}, "1 to 512"),
        ("fallback", {"patterns": ["a"], "precision": "fp4"}, "bf16, or fp8"),
        ("pause", {"seconds": 0}, "1 to 3600"),
        ("pause", {"seconds": 3601}, "1 to 3600"),
        ("pause", {"seconds": True}, "1 to 3600"),
        ("pause", {"seconds": "9"}, "1 to 3600"),
    ],
    ids=str,
)
def test_arguments_are_bounded(listening: Recorder, kind: str, arguments: Any, message: str) -> None:
    with pytest.raises(commands.CommandError, match=message):
        commands.give(listening.run, kind, arguments)
    assert not Command.objects.exists()


def test_the_number_of_waiting_commands_is_bounded(listening: Recorder) -> None:
    for _ in range(commands.MAX_WAITING):
        commands.give(listening.run, "checkpoint")
    with pytest.raises(commands.CommandError, match="already waiting"):
        commands.give(listening.run, "checkpoint")


def test_refuses_the_result_of_an_unknown_command(listening: Recorder) -> None:
    with pytest.raises(InvalidError, match="no command 12345"):
        send_report(listening, kind="command", command=12345, state="done")


def overflow(run: Run) -> ConditionChange:
    names = ("blocks.1.down.grad_output", "blocks.0.up.input")
    tensors = [{"name": name, "rate": 0.2, "onset_step": 20} for name in names]
    return ConditionChange(
        opened=True,
        onset_step=20,
        step=30,
        value=0.2,
        threshold=0.001,
        message="20 % of it overflowed",
        evidence={"tensors": tensors, "tensors_over": 2},
    )


@pytest.mark.parametrize("action", [RuleAction.NOTHING, RuleAction.FALLBACK])
def test_a_rule_falls_back_the_layers_that_its_evidence_names(
    listening: Recorder, action: RuleAction
) -> None:
    rule = Rule.objects.get(project=listening.run.project, kind="saturation_rate")
    assert rule.action == RuleAction.NOTHING, "off by default"
    rule.action = action
    (event,) = apply(listening.run, [Detection(rule, overflow(listening.run), "run/0", "0")]).opened
    if action == RuleAction.NOTHING:
        assert not Command.objects.exists()
        return
    (received,) = commands.commands_for(listening.run, listening.uuid, 0)
    assert received["arguments"] == {"patterns": ["blocks.0.up", "blocks.1.down"], "precision": "bf16"}
    assert received["given_by"] == "an alert rule" and received["reason"] == event.message


def test_a_rule_opens_its_event_if_no_process_accepts_commands(writer: Recorder) -> None:
    rule = Rule.objects.get(project=writer.run.project, kind="saturation_rate")
    rule.action = RuleAction.FALLBACK
    assert len(apply(writer.run, [Detection(rule, overflow(writer.run), "run/0", "0")]).opened) == 1
    assert not Command.objects.exists()
