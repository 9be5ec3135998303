"""A step that an alert may follow from is sent at once, others with the next batch."""

import math
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer
from agent.helpers.writer import rows_acknowledged
from helpers.waiting import wait_until

from fp8scope.config import Settings
from fp8scope.delivery.sender import Sender
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.urgency import FIRST_POINTS, MAX_STREAK, Urgency
from fp8scope.run import Run

# No batch is sent within a test because its time has come.
INTERVAL = 1000.0
NO_TENSORS = np.zeros((0, 0))


def statistics(**counts: float) -> np.ndarray:
    """The statistics of a step with 10,000 elements a tensor; the counts are those of the last tensor."""
    columns = ("numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite")
    rows = np.tile([10_000.0, 1.0, 448.0, 0.0, 0.0, 0.0, 0.0], (3, 1))
    for name, count in counts.items():
        rows[-1, columns.index(name)] = count
    return rows


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


@pytest.mark.parametrize(
    ("counts", "urgent"),
    [
        ({}, False),
        ({"saturated": 4}, False),
        ({"saturated": 20}, True),
        ({"nonfinite": 20}, True),
        ({"underflow": 3_000, "subnormal": 9_000}, False),
        ({"underflow": 6_000}, True),
        # A count that is unknown, and a tensor that was not observed.
        ({"saturated": math.nan}, False),
        ({"numel": 0}, False),
    ],
)
def test_a_tensor_that_leaves_its_range_is_urgent(counts: dict[str, float], urgent: bool) -> None:
    assert Urgency().is_urgent({"loss": 1.0}, statistics(**counts)) is urgent
    assert not Urgency().is_urgent({"loss": 1.0}, NO_TENSORS)


@pytest.mark.parametrize(("name", "factor"), [("loss", 1.15), ("grad_norm", 4.0)])
def test_a_scalar_far_above_its_level_is_urgent(name: str, factor: float) -> None:
    chance, urgency = random.Random(1), Urgency()

    def noisy(value: float) -> dict[str, float]:
        return {name: value * math.exp(0.02 * chance.gauss(0.0, 1.0))}

    usual = [urgency.is_urgent(noisy(2.0 + 8.0 / (1 + n)), NO_TENSORS) for n in range(300)]
    assert sum(usual) < 15 and not any(usual[:FIRST_POINTS])
    assert all(urgency.is_urgent(noisy(2.0 * factor), NO_TENSORS) for _ in range(5))
    # The level of a run that stays there follows.
    assert sum(urgency.is_urgent(noisy(2.0 * factor), NO_TENSORS) for _ in range(2 * MAX_STREAK)) < MAX_STREAK


def test_what_lasts_is_not_urgent_for_ever() -> None:
    urgency = Urgency()
    lasting = [urgency.is_urgent({}, statistics(underflow=9_000)) for _ in range(2 * MAX_STREAK)]
    assert lasting == [True] * MAX_STREAK + [False] * MAX_STREAK
    # Another bound still is, and so is this one after as long a pause.
    assert urgency.is_urgent({"loss": math.nan}, statistics(underflow=9_000))
    for _ in range(2 * MAX_STREAK):
        assert not urgency.is_urgent({}, statistics())
    assert urgency.is_urgent({}, statistics(saturated=9_000))


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300])
def test_any_scalar_can_be_judged(value: float) -> None:
    urgency = Urgency()
    for _ in range(50):
        urgency.is_urgent({"loss": value, "grad_norm": value}, NO_TENSORS)


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


def test_a_step_may_be_sent_before_it_is_known_to_be_urgent(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends may see it after it is written, but before `hasten` tells that it is urgent."""
    run = Run(replace(settings, interval=INTERVAL), blank_registration("late"))
    hasten, late = Sender.hasten, [True]

    def hasten_late(sender: Sender, end: int) -> bool:
        if late:
            late.clear()
            run.session.writers.pipeline.sending.wake()
            wait_until(lambda: sender.cursor.progress.position >= end, "the step is sent")
        return hasten(sender, end)

    monkeypatch.setattr(Sender, "hasten", hasten_late)
    step(run, math.nan)
    wait_until(lambda: rows_acknowledged(run) == 1, "the first batch")
    step(run, 1.0)
    wait_until(lambda: rows_acknowledged(run) == 2, "the batch after it, which fetches the alert")
    assert run.finish().complete


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


def test_a_condition_that_lasts_is_sent_often_but_not_in_each_step(
    server: WireServer, settings: Settings
) -> None:
    """The server decides after several steps; the one that decides must not wait for the next batch."""
    # Urgent messages are 0.2 intervals apart.
    run = Run(replace(settings, interval=1.0), blank_registration("spike"))
    for _ in range(2 * FIRST_POINTS):
        step(run, 1.0)
    wait_until(lambda: rows_acknowledged(run) == 2 * FIRST_POINTS, "the steps before")
    before, began = len(server.requests), time.monotonic()
    for _ in range(100):
        step(run, 2.0)
        time.sleep(0.02)
    seconds = time.monotonic() - began
    batches = [path for _, path in server.requests[before:] if "/batches" in path]
    assert seconds / 1.0 + 2 < len(batches) <= seconds / 0.2 + 3
    assert run.finish().complete and len(server.run.steps) == 2 * FIRST_POINTS + 100


def test_urgent_messages_are_bounded(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8scope.delivery.sender.MAX_URGENT", 3)
    run = Run(replace(settings, interval=2.0), blank_registration("often"))
    for number in range(150):
        step(run, math.nan if number % 2 else 1.0)
        time.sleep(0.02)
    # Three urgent ones, what follows each of them for its answer, and those of the interval.
    assert len([path for _, path in server.requests if "/batches" in path]) <= 3 + 6 + 3
    assert run.finish().complete and len(server.run.steps) == 150


def test_the_message_says_that_it_is_urgent(server: WireServer, settings: Settings) -> None:
    run = Run(replace(settings, interval=0.2), blank_registration("flag"))
    queries: list[str] = []
    answered = server.answer

    def answer(
        method: str, path: str, query: str, content_type: str, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        if path.endswith("/batches"):
            queries.append(query)
        return answered(method, path, query, content_type, body)

    server.answer = answer  # type: ignore[method-assign]
    step(run, 1.0)
    wait_until(lambda: rows_acknowledged(run) == 1, "a step")
    step(run, math.nan)
    wait_until(lambda: rows_acknowledged(run) == 2, "the urgent step")
    assert ["urgent=1" in query for query in queries] == [False, True]
    assert run.finish().complete
