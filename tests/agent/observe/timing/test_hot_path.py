"""What makes a step cheap: memory that is exchanged, a thread seldom woken, events that are used again."""

import threading
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.observe.timing.clock import BACKWARD, FORWARD, DeviceClock
from fp8scope.process.threads import WakeEvent
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import E4M3, MXFP8, StatisticsBuffer


def test_it_works(server: WireServer, settings: Settings) -> None:
    """Every step's statistics are its own, though the memory they are written to is used in turn."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    fp8scope.convert(model, fp8scope.CurrentScaling())
    run = Run(settings, blank_registration("exchange"))
    run.watch(model, every=0)
    for rows in range(1, 41):
        with run.step():
            model(torch.full((rows, 32), float(rows))).sum().backward()
    assert run.finish().errors == 0
    names = [tensor["name"] for tensor in next(iter(server.run.catalogues.values()))]
    place = names.index("0.input")
    assert [row["tensors"]["numel"][place] for row in server.run.rows] == [32 * n for n in range(1, 41)]
    assert [row["tensors"]["amax"][place] for row in server.run.rows] == [float(n) for n in range(1, 41)]


def test_block_statistics_cover_only_the_sampled_step(server: WireServer, settings: Settings) -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    fp8scope.convert(model, MXFP8())
    run = Run(settings, blank_registration("blocks"))
    run.watch(model, every=4)
    for _ in range(9):
        with run.step():
            model(torch.ones(4, 32)).sum().backward()
    assert run.finish().errors == 0
    blocks = [row["tensors"].get("blocks") for row in server.run.rows]
    sampled = [blocks[0], blocks[4], blocks[8]]
    assert sampled[0] and sampled == [sampled[0]] * 3


def test_exchanged_buffers_are_zeroed_and_reused() -> None:
    buffer = StatisticsBuffer(4)
    slot = buffer.register("x", format=E4M3, shape=(1,), role="input")
    slot.row.fill_(7.0)
    filled = buffer.exchange()
    assert (filled[0] == 7).all() and (buffer.storage == 0).all() and (slot.row == 0).all()
    buffer.recycle(filled)
    slot.row.fill_(8.0)
    second = buffer.exchange()
    assert buffer.storage is filled and (buffer.storage == 0).all() and (second[0] == 8).all()


def test_buffers_are_not_reused_after_growth() -> None:
    buffer = StatisticsBuffer(1)
    buffer.register("a", format=E4M3, shape=(1,), role="input")
    buffer.recycle(buffer.exchange())
    buffer.register("b", format=E4M3, shape=(1,), role="input")
    buffer.exchange()
    assert buffer.capacity == 2 and len(buffer.data) == 2


def test_wait_returns_at_once_if_the_event_is_set() -> None:
    event = WakeEvent()
    event.set()
    event.set()
    event.wait(600)
    # Two wake-ups before a wait are one.
    event.wait(0.001)


def test_set_wakes_a_waiting_thread() -> None:
    event, woken = WakeEvent(), threading.Event()

    def sleep() -> None:
        event.wait(600)
        woken.set()

    threading.Thread(target=sleep, daemon=True).start()
    event.set()
    assert woken.wait(60)


class FakeEvent:
    """A CUDA event of a device whose time is told."""

    now = 0.0
    made = 0

    def __init__(self, **options: Any) -> None:
        assert options == {"enable_timing": True, "blocking": True}
        FakeEvent.made += 1
        self.at = -1.0

    def record(self, stream: Any) -> None:
        self.at = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.now >= self.at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1000 * (other.at - self.at)


@pytest.fixture
def device_clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr(FakeEvent, "now", 0.0)
    monkeypatch.setattr(FakeEvent, "made", 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return DeviceClock(torch.device("cuda"))


def test_device_time_is_measured_between_events(device_clock: DeviceClock) -> None:
    for step in range(50):
        device_clock.begin()
        for phase, seconds in ((FORWARD, 2.0), (BACKWARD, 3.0), (FORWARD, 1.0)):
            FakeEvent.now += seconds
            device_clock.mark(phase)
        FakeEvent.now += 0.5
        times = device_clock.end()
        assert times is not None and times.is_ready(), step
        times.wait()
        found = times.read()
        assert (found["time_forward"], found["time_backward"], found["time_other"]) == (3, 3, 0.5)
    # A step needs four, and one that it shares with the next.
    assert FakeEvent.made == 5


def test_records_no_events_during_graph_capture(
    device_clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_clock.begin()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device_clock.mark(FORWARD)
    assert device_clock.end() is None and FakeEvent.made == 1


def test_a_step_without_marks_has_no_times(device_clock: DeviceClock) -> None:
    device_clock.begin()
    assert device_clock.end() is None
