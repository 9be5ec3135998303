"""Memory and utilisation are sampled in a dedicated thread, never in the training thread."""

import mmap
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import nn

from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.observe.timing.driver import GpuDriver
from fp8scope.observe.timing.machine import (
    Machine,
    anonymous_bytes,
    device_memory,
    resident_bytes,
)
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def test_it_works(server: WireServer, settings: Settings) -> None:
    model = nn.Linear(4, 4)
    # A budget makes steps this short light: only their loss is taken, and the sample waits for another.
    run = Run(replace(settings, overhead=None), blank_registration("machine"))
    run.watch(model)
    deadline = time.monotonic() + 60
    while run.session.steps.measures._machine._sample is None and time.monotonic() < deadline:
        with run.step():
            model(torch.ones(1, 4)).sum().backward()
    with run.step():
        pass
    assert run.finish().errors == 0
    seen = [value for value in server.run.scalars("memory_rss") if value is not None]
    assert seen and all(1e7 < value < 1e12 for value in seen)
    assert not [t for t in threading.enumerate() if t.name == "fp8scope-sampler"]


def test_each_sample_belongs_to_one_step() -> None:
    machine = Machine(Guard(), lambda: None)
    assert machine.take() == {}
    assert machine.sample() > 0
    assert machine.take()["memory_rss"] > 0 and machine.take() == {}


def test_resident_memory_grows_with_what_is_used() -> None:
    before = resident_bytes()
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    after = resident_bytes()
    assert before is not None and after is not None and after - before > 32 << 20


def test_mapped_files_are_not_anonymous_memory(tmp_path: Path) -> None:
    before, resident = anonymous_bytes(), resident_bytes()
    path = tmp_path / "data"
    path.write_bytes(b"x" * (64 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert (resident_bytes() or 0) - (resident or 0) > 32 << 20
        assert abs((anonymous_bytes() or 0) - (before or 0)) < 16 << 20
        held = bytearray(b"x") * (64 << 20)
        assert (anonymous_bytes() or 0) - (before or 0) > 32 << 20
        del held


def test_values_are_unknown_without_system_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*arguments: Any, **named: Any) -> Any:
        raise OSError

    monkeypatch.setattr("builtins.open", nothing)
    # What was resident at most is what is left to ask for.
    assert (resident_bytes() or 0) > 1e6
    monkeypatch.setitem(sys.modules, "resource", None)
    assert resident_bytes() is None and anonymous_bytes() is None


def test_does_not_initialise_an_unused_device() -> None:
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert device_memory(torch.device("cuda", 0)) == {}
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_queries_a_device_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "allocated_bytes.all.current": 10,
        "reserved_bytes.all.current": 20,
        "allocated_bytes.all.peak": 15,
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: stats)
    driver = GpuDriver({"gpu_utilization": lambda: 0.75}, OSError)
    monkeypatch.setattr("fp8scope.observe.timing.machine.driver_of", lambda device: driver)
    machine = Machine(Guard(), lambda: torch.device("cuda", 3))
    machine.sample()
    found = machine.take()
    del found["memory_rss"], found["memory_anonymous"]
    assert found == {
        "memory_allocated": 10,
        "memory_reserved": 20,
        "memory_peak": 15,
        "gpu_utilization": 0.75,
    }
