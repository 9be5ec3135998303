"""Giving commands to a run, and what it answers."""

import threading
from collections.abc import Callable
from typing import Any

from agent.helpers.wire_server import WireServer
from helpers.waiting import PATIENCE_SECONDS, wait_until

from fp8scope.config import Settings
from fp8scope.delivery.inbox import Alert
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


def alert_arrives(run: Run, server: WireServer, alert: dict[str, Any]) -> None:
    """Open an alert on the server and wait, without a step, until the run has it.

    A run keeps its last steps only: one that trains on while a busy machine brings the alert would forget
    the steps that the alert is about.
    """
    arrived = threading.Event()

    def note(incoming: Alert) -> None:
        if incoming.id == alert["id"]:
            arrived.set()

    run.session.alerts.listeners.append(note)
    server.alerts.append(alert)
    assert arrived.wait(PATIENCE_SECONDS)
    run.session.alerts.listeners.remove(note)


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
