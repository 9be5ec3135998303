"""How long the agent gathers rows before the next batch."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings
from fp8scope.delivery.cursor import Cursor, SendProgress
from fp8scope.delivery.sender import MAX_LOAD, MIN_PAUSE, Sender
from fp8scope.guard import Guard
from fp8scope.recording.records import RecordKind, Row, dump_json
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.spool import Spool

INTERVAL = 1000.0


@pytest.fixture
def spool() -> Iterator[Spool]:
    spool = Spool(None)
    spool.append(RecordKind.REGISTRATION, dump_json(blank_registration("pause")))
    yield spool
    spool.close()


def record(spool: Spool, step: int) -> None:
    spool.append(
        RecordKind.ROW,
        Row(
            step=step,
            time_us=1_767_225_600_000_000,
            dropped=0,
            scalars={"loss": 1.0},
            statistics=np.zeros((0, 7)),
        ).encode(),
    )


def sender_of(spool: Spool, settings: Settings) -> Sender:
    writer = str(uuid.uuid4())
    patient = replace(settings, interval=INTERVAL, heartbeat_seconds=INTERVAL)
    return Sender(str(uuid.uuid4()), spool, Cursor(None, SendProgress(writer=writer)), patient, Guard())


def pause_after_a_batch(spool: Spool, settings: Settings, server: WireServer) -> float:
    """The seconds that the sender waits with the next row, after it has sent one."""
    sender = sender_of(spool, settings)
    record(spool, 1)
    while not server.runs or server.run.steps != [1]:
        sender.advance()
    record(spool, 2)
    pause = sender.advance()
    sender.close()
    assert server.run.steps == [1]
    return pause


@pytest.mark.parametrize(
    ("asked", "share"),
    [(0.0, MIN_PAUSE), (0.05 * INTERVAL, MIN_PAUSE), (0.7 * INTERVAL, 0.7), (9 * INTERVAL, 1.0)],
)
def test_it_works(spool: Spool, settings: Settings, server: WireServer, asked: float, share: float) -> None:
    """The server asks for a pause; it is kept within the agent's bounds."""
    server.pause = asked
    pause = pause_after_a_batch(spool, settings, server)
    assert (share - 0.1) * INTERVAL < pause <= share * INTERVAL


@pytest.mark.parametrize("asked", ["soon", -1.0, None, [3]])
def test_an_answer_without_a_pause_changes_nothing(
    spool: Spool, settings: Settings, server: WireServer, asked: object
) -> None:
    """That of an earlier server, or of none that we know."""
    server.pause = asked
    pause = pause_after_a_batch(spool, settings, server)
    assert (MIN_PAUSE - 0.1) * INTERVAL < pause <= INTERVAL


def test_one_slow_message_is_no_reason_to_wait(
    spool: Spool, settings: Settings, server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But many are: then sending would take too much of the training's processors."""
    server.pause = 0.0
    monkeypatch.setattr(time, "thread_time", itertools.count(0.0, 0.5 * MAX_LOAD * INTERVAL).__next__)
    sender = sender_of(spool, settings)
    pauses = []
    record(spool, 1)
    for step in range(1, 20):
        sender.hurry = True
        while not server.runs or len(server.run.steps) < step:
            sender.advance()
        sender.hurry = False
        record(spool, step + 1)
        pauses.append(sender.advance() / INTERVAL)
    sender.close()
    assert pauses[0] <= MIN_PAUSE
    assert pauses[-1] > MIN_PAUSE


def test_urgent_rows_do_not_wait(spool: Spool, settings: Settings, server: WireServer) -> None:
    server.pause = INTERVAL
    sender = sender_of(spool, settings)
    record(spool, 1)
    while not server.runs or server.run.steps != [1]:
        sender.advance()
    record(spool, 2)
    assert sender.hasten(spool.end)
    assert sender.advance() == 0.0
    assert server.run.steps == [1, 2]
    sender.close()
