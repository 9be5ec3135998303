"""Giving commands to a run, and what it answers."""

from collections.abc import Callable
from typing import Any

from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def command(number: int, kind: str, /, **arguments: Any) -> dict[str, Any]:
    """As a server has it in its answers."""
    return {
        "id": number,
        "kind": kind,
        "arguments": arguments,
        "reason": "because",
        "given_by": "ada",
        "expires_in": 600.0,
    }


def begin(settings: Settings, **more: Any) -> Run:
    return Run(settings, blank_registration("commands"), **more)


def steps_until(run: Run, done: Callable[[], object]) -> None:
    """Make steps until it is done."""

    def is_done() -> object:
        if not (reached := done()):
            with run.step() as step:
                step.log(loss=1.0)
        return reached

    wait_until(is_done, pause=0.002)


def results(server: WireServer) -> list[tuple[int, str, str]]:
    """What the run has answered: each command's number, the state, and the message."""
    found = [one for stored in server.runs.values() for one in stored.reports_of("command")]
    return [(one["command"], one["state"], one["message"]) for one in found]


def answered(server: WireServer) -> set[int]:
    return {number for number, _, _ in results(server)}
