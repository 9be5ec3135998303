"""Alerts come back with the acknowledgements and are handled once, on the training thread."""

import threading
from typing import Any

import pytest
from agent.helpers.commanding import steps_until
from agent.helpers.wire_server import WireServer

from fp8scope import Alert
from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def alert(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "kind": "loss_not_finite",
        "severity": "critical",
        "step": 5,
        "message": "m",
        **more,
    }


def test_it_works(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("alerts"))
    seen: list[tuple[Alert, threading.Thread]] = []
    run.on_alert(lambda found: seen.append((found, threading.current_thread())))
    server.alerts = [alert(1, onset_step=3, value=None, threshold=2.5, opened_at="2026-01-01T00:00:00Z")]
    steps_until(run, lambda: seen)
    server.alerts.append(alert(2))
    steps_until(run, lambda: len(seen) == 2)
    run.finish()
    assert [found.id for found, _ in seen] == [1, 2]
    assert {thread for _, thread in seen} == {threading.current_thread()}
    first = seen[0][0]
    assert (first.kind, first.step, first.onset_step, first.value, first.threshold) == (
        "loss_not_finite",
        5,
        3,
        None,
        2.5,
    )


def test_an_alert_is_handled_once_by_every_callback(server: WireServer, settings: Settings) -> None:
    server.alerts = [alert(number) for number in (1, 2, 3)]
    run = Run(settings, blank_registration("alerts"))
    one: list[int] = []
    two: list[int] = []
    run.on_alert(lambda found: one.append(found.id))
    run.on_alert(lambda found: two.append(found.id))
    for _ in range(20):
        with run.step():
            pass
    run.finish()
    assert one == two == [1, 2, 3]


def test_what_a_callback_raises_is_the_users(server: WireServer, settings: Settings) -> None:
    class StopTraining(Exception):
        pass

    def stop(found: Alert) -> None:
        raise StopTraining(found.kind)

    server.alerts = [alert(1)]
    run = Run(settings, blank_registration("stop"))
    run.on_alert(stop)
    with pytest.raises(StopTraining), run:
        steps_until(run, lambda: False)
    assert server.run.finish["state"] == "failed" and "StopTraining" in server.run.finish["error"]


@pytest.mark.parametrize(
    "nonsense", [[None], ["x"], [{}], [{"id": "7"}], {"id": 1}, [{"id": 4, "kind": 3, "step": "x"}]], ids=str
)
def test_nonsense_from_a_server_hurts_nobody(nonsense: Any, server: WireServer, settings: Settings) -> None:
    answer = WireServer.answer

    def other(self: WireServer, *arguments: Any) -> Any:
        status, document = answer(self, *arguments)
        return status, {**document, "alerts": nonsense}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WireServer, "answer", other)
        run = Run(settings, blank_registration("nonsense"))
        run.on_alert(lambda found: None)
        for _ in range(10):
            with run.step():
                pass
        assert run.finish().complete
    assert server.run.steps == list(range(1, 11))


def test_a_callback_must_be_callable(settings: Settings) -> None:
    run = Run(settings, blank_registration("x"))
    with pytest.raises(TypeError, match="something to call"):
        run.on_alert("not callable")  # type: ignore[arg-type]
