"""Commands come back with the acknowledgements, are done once, on the training thread, and are answered."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from agent.helpers.commanding import answered, begin, command, results, steps_until
from agent.helpers.faulty_http import Fault
from agent.helpers.models import tiny_model, train_step
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

import fp8scope
from fp8scope import Command
from fp8scope.config import ConfigurationError, Settings
from fp8scope.control.command_queue import CommandQueue, CommandState, RefusedError


def test_it_works(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    seen: list[tuple[Command, threading.Thread, int]] = []

    def checkpoint(asked: Command) -> str:
        seen.append((asked, threading.current_thread(), run.session.step))
        return "written to /checkpoints/7"

    run.on_command("checkpoint", checkpoint)
    server.commands = [command(3, "checkpoint", keep=True)]
    steps_until(run, lambda: results(server))
    run.finish()
    ((asked, thread, step),) = seen
    assert (asked.id, asked.kind, asked.arguments, asked.reason) == (
        3,
        "checkpoint",
        {"keep": True},
        "because",
    )
    assert thread is threading.current_thread()
    assert results(server) == [(3, "done", "written to /checkpoints/7")]
    assert server.run.reports_of("command")[0]["step"] == step
    assert [one["accepts"] for one in server.run.reports_of("accepts")] == [["checkpoint"]]


def test_what_is_delivered_twice_is_done_once(server: WireServer, settings: Settings) -> None:
    """The acknowledgement is lost again and again, on both ways."""
    run = begin(settings)
    done: list[int] = []
    run.on_command("checkpoint", lambda asked: done.append(asked.id))
    server.commands = [command(number, "checkpoint") for number in (1, 2, 3)]
    server.times(10, Fault(drop=True, after=True))
    steps_until(run, lambda: len(answered(server)) == 3)
    run.finish()
    assert done == [1, 2, 3]
    assert results(server) == [(number, "done", "") for number in (1, 2, 3)]


def test_a_result_survives_the_servers_restart(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    done: list[int] = []

    def checkpoint(asked: Command) -> str:
        done.append(asked.id)
        server.stop()
        return "stopped it"

    run.on_command("checkpoint", checkpoint)
    server.commands = [command(1, "checkpoint")]
    steps_until(run, lambda: done)
    for _ in range(5):
        with run.step():
            pass
    server.start()
    assert run.finish().complete
    assert results(server) == [(1, "done", "stopped it")]


def test_what_a_callback_raises_is_the_users_and_is_told(server: WireServer, settings: Settings) -> None:
    class DiskFull(Exception):
        pass

    def checkpoint(asked: Command) -> None:
        raise DiskFull("no space")

    run = begin(settings)
    run.on_command("checkpoint", checkpoint)
    server.commands = [command(1, "checkpoint")]
    with pytest.raises(DiskFull), run:
        steps_until(run, lambda: False)
    assert results(server) == [(1, "failed", "DiskFull: no space")]


@pytest.mark.parametrize("kind", ["checkpoint", "pause", "resume", "fallback", "rm-rf"])
def test_nothing_is_done_that_the_script_does_not_allow(
    kind: str, server: WireServer, settings: Settings
) -> None:
    run = begin(settings, commands=())
    server.commands = [command(1, kind)]
    steps_until(run, lambda: results(server))
    run.finish()
    assert results(server) == [(1, "refused", "The training script does not allow this command.")]
    assert server.run.reports_of("accepts") == []


def test_what_is_accepted_follows_from_what_the_script_does(server: WireServer, settings: Settings) -> None:
    run = begin(settings)

    def step() -> None:
        with run.step():
            pass

    step()
    run.watch(model := tiny_model())
    step()
    run.allow_pause(5)
    run.on_command("checkpoint", lambda asked: None)
    step()
    run.finish()
    assert [one["accepts"] for one in server.run.reports_of("accepts")] == [
        ["fallback"],
        ["checkpoint", "fallback", "pause", "resume"],
    ]
    del model


def test_what_came_too_late_is_not_done(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    run.on_command("checkpoint", lambda asked: pytest.fail("it had expired"))
    server.commands = [{**command(1, "checkpoint"), "expires_in": -1}]
    steps_until(run, lambda: results(server))
    run.finish()
    assert results(server) == [(1, "refused", "The command expired before the step ended.")]


def test_a_run_that_ends_refuses_what_is_left(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    run.on_command("checkpoint", lambda asked: pytest.fail("no step ended"))
    with run.step():
        pass
    server.commands = [command(1, "checkpoint")]
    wait_until(lambda: run.controller.commands.waiting, "the command")
    run.finish()
    assert results(server) == [(1, "refused", "The run has ended.")]


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        "x",
        {"id": 1},
        [None],
        [{}],
        [{"id": 1}],
        [{"id": "1", "kind": "fallback"}],
        [{"id": 1, "kind": 3}],
    ],
    ids=str,
)
def test_nonsense_from_a_server_hurts_nobody(nonsense: Any, server: WireServer, settings: Settings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WireServer, "_commands", lambda self, query: nonsense)
        run = begin(settings)
        run.on_command("checkpoint", lambda asked: pytest.fail("nobody asked"))
        for _ in range(10):
            with run.step():
                pass
        assert run.finish().complete
    assert server.run.steps == list(range(1, 11))


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "name"), ("Check Point", "name"), ("x" * 65, "name"), ("1st", "name"), ("é", "name")],
)
def test_names_are_checked(settings: Settings, name: str, message: str) -> None:
    run = begin(settings)
    with pytest.raises(ConfigurationError, match=message):
        run.on_command(name, lambda asked: None)
    with pytest.raises(TypeError, match="needs a callable"):
        run.on_command("checkpoint", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="must be longer than 0"):
        run.allow_pause(0)
    with pytest.raises(ConfigurationError, match="commands must be among"):
        fp8scope.init(mode="disabled", commands=("explode",))


def test_there_is_a_bound_to_what_is_handled_and_waits() -> None:
    answers: list[tuple[int, CommandState, str]] = []
    desk = CommandQueue(
        (), lambda asked, state, message: answers.append((asked.id, state, message)), str, bool
    )
    for number in range(24):
        desk.handle(f"do-{number}", lambda asked: None)
    with pytest.raises(ConfigurationError, match="at most 24"):
        desk.handle("one-more", lambda asked: None)
    desk.take([command(number, "do-1") for number in range(1, 2001)])
    desk.work()
    assert len(answers) == 1000 and answers[-1] == (2000, "done", "")
    desk.take([command(5, "do-1")])
    desk.work()
    assert len(answers) == 1000, "an old id comes no second time"


def test_a_refusal_says_why() -> None:
    answers: list[tuple[CommandState, str]] = []

    def refuse(asked: Command) -> str:
        raise RefusedError("not now")

    desk = CommandQueue(
        ("fallback",), lambda asked, state, message: answers.append((state, message)), refuse, bool
    )
    desk.take([command(1, "fallback")])
    desk.work()
    assert answers == [("refused", "not now")]


def test_offline_nobody_is_asked(settings: Settings, server: WireServer) -> None:
    run = begin(replace(settings, mode="offline"))
    run.watch(model := tiny_model())
    with run.step():
        train_step(model)
    assert run.finish().directory is not None and server.asked_for_commands == 0
