"""A pause lasts until somebody says so, and no longer than the script allows."""

import threading
from dataclasses import replace

from agent.helpers.commanding import answered, begin, command, results, steps_until
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def test_it_works(server: WireServer, settings: Settings) -> None:
    # Long enough that only what asks more often can be quick.
    run = Run(replace(settings, heartbeat_seconds=30.0), blank_registration("pause"))
    run.allow_pause(50)
    server.commands = [command(1, "pause", seconds=40)]
    accepted = threading.Event()

    def resume_later() -> None:
        wait_until(lambda: (1, "accepted", "Paused for at most 40 s.") in results(server), "the pause")
        accepted.set()
        server.commands.append(command(2, "resume"))

    with run.step():
        pass
    helper = threading.Thread(target=resume_later)
    helper.start()
    steps_until(run, lambda: 2 in answered(server) and len(results(server)) == 3)
    helper.join()
    run.finish()
    assert accepted.is_set()
    states = [(number, state) for number, state, _ in results(server)]
    assert states == [(1, "accepted"), (2, "done"), (1, "done")]
    assert results(server)[2][2].startswith("Resumed after")


def test_a_pause_is_bounded_by_the_script(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    run.allow_pause(0.05)
    server.commands = [command(1, "pause", seconds=3600)]
    steps_until(run, lambda: len(results(server)) == 2)
    server.commands.append(command(2, "resume"))
    steps_until(run, lambda: 2 in answered(server))
    run.finish()
    assert [message for _, _, message in results(server)] == [
        "Paused for at most 0 s.",
        "Resumed automatically after 0 s.",
        "The training was not paused.",
    ]
