"""A step in which a scalar becomes NaN or infinite is sent at once, others with the next batch."""

import math
import time
from dataclasses import replace

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer
from agent.helpers.writer import rows_acknowledged
from helpers.waiting import wait_until

from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.urgency import Urgency
from fp8scope.run import Run

# No batch is sent within a test because its time has come.
INTERVAL = 1000.0


def test_it_works() -> None:
    urgency = Urgency()
    losses = [1.0, math.nan, math.nan, 2.0, math.inf, -math.inf, 1.0]
    assert [urgency.is_news({"loss": loss, "lr": 0.1}) for loss in losses] == [
        False, True, False, False, True, False, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "news"),
    [
        ([{}], [False]),
        # The sum is infinite, the values are not.
        ([{"a": 1e308, "b": 1e308}], [False]),
        # A value that is not logged in each step.
        ([{"a": math.nan}, {"b": 1.0}, {"a": math.nan}, {"a": 1.0}, {"a": math.nan}], [1, 0, 0, 0, 1]),
        ([{"a": math.nan, "b": 1.0}, {"a": math.nan, "b": math.inf}], [True, True]),
    ],
)
def test_is_news_only_once(steps: list[dict[str, float]], news: list[bool]) -> None:
    urgency = Urgency()
    assert [urgency.is_news(scalars) for scalars in steps] == news


def step(run: Run, loss: float) -> None:
    with run.step() as step:
        step.log(loss=loss)


def test_a_loss_that_becomes_nan_is_sent_at_once(server: WireServer, settings: Settings) -> None:
    run = Run(replace(settings, interval=INTERVAL), blank_registration("urgent"))
    step(run, 1.0)
    step(run, math.nan)
    wait_until(lambda: rows_acknowledged(run) == 2, "the urgent batch, with the step before it")
    # The answer to it cannot have the alert yet.
    step(run, 1.0)
    wait_until(lambda: rows_acknowledged(run) == 3, "the batch after it, which fetches the alert")
    # A loss that is NaN again and again is not sent in each step.
    step(run, math.nan)
    time.sleep(0.5)
    assert rows_acknowledged(run) == 3
    assert run.finish().complete and server.run.steps == [1, 2, 3, 4]


def test_the_alert_is_fetched_before_a_long_step_ends(server: WireServer, settings: Settings) -> None:
    """The training process gets it at the end of the next step, however long that takes."""
    run = Run(
        replace(settings, interval=INTERVAL, heartbeat_seconds=INTERVAL), blank_registration("long steps")
    )
    alerts: list[str] = []
    run.on_alert(lambda alert: alerts.append(alert.kind))
    step(run, math.nan)
    with run.step():
        wait_until(lambda: server.requests, "the urgent batch")
        server.alerts = [{"id": 1, "kind": "loss_not_finite", "severity": "critical", "message": "NaN"}]
        wait_until(lambda: server.run.heartbeats, "the heartbeat after it")
        wait_until(lambda: run.session.alerts.waiting, "its answer")
    assert alerts == ["loss_not_finite"]
    run.finish()


def test_urgency_does_not_hurry_a_server_that_is_down(server: WireServer, settings: Settings) -> None:
    run = Run(replace(settings, interval=INTERVAL, hold_seconds=INTERVAL), blank_registration("down"))
    server.plan = lambda method, path: Fault(status=401, code="bad_token")
    step(run, math.nan)
    wait_until(lambda: server.requests, "an attempt")
    sent = len(server.requests)
    for loss in (1.0, math.nan) * 10:
        step(run, loss)
        time.sleep(0.01)
    assert len(server.requests) <= sent + 1
    server.plan = lambda method, path: None
    assert run.finish().complete and len(server.run.steps) == 21
