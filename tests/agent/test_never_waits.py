"""The training thread waits for nothing: no `.item()`, no copy that blocks, no network, no full queue."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from agent.models import tiny_model, train_step
from agent.wire_server import Fault, WireServer
from torch.utils._python_dispatch import TorchDispatchMode

import fp8scope
from fp8scope.collector import Collector
from fp8scope.config import Settings
from fp8scope.registration import blank_registration
from fp8scope.run import Run

WAITING = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero")


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that the training thread runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def no_network_here() -> Iterator[list[str]]:
    """Record every connection that this thread tries to make."""
    tried: list[str] = []
    connect = socket.socket.connect
    me = threading.current_thread()

    def watched(self: socket.socket, address: Any) -> None:
        if threading.current_thread() is me:
            tried.append(str(address))
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", watched)
        yield tried


def test_it_works(server: WireServer, settings: Settings) -> None:
    model = tiny_model()
    run = Run(settings, blank_registration("waits for nothing"))
    run.watch(model)
    with no_network_here() as tried:
        for _ in range(5):
            loss = train_step(model)
            step = run.step(tokens=8)
            with Operators() as operators, step:
                step.log(loss=loss, norm=loss.detach() * 2)
                step.log(plain=1.0)
            assert not [name for name in operators.seen if name in WAITING], operators.seen
    assert tried == []
    run.finish()
    assert len(server.run.rows) == 5


def test_the_counter_would_see_an_item() -> None:
    with Operators() as operators:
        torch.ones(()).item()
    assert operators.seen["aten::_local_scalar_dense"] == 1


def test_a_step_on_the_cpu_costs_no_more_than_a_handful_of_operators(settings: Settings) -> None:
    collector = Collector()
    collector.watch(tiny_model())
    with Operators() as operators:
        collector.snapshot({})
    assert sum(operators.seen.values()) <= 8, operators.seen


def test_init_returns_while_the_server_hangs(server: WireServer, tmp_path: Any) -> None:
    server.plan = lambda method, path: Fault(hang=True)
    with no_network_here() as tried:
        run = fp8scope.init(name="x", url=server.url, token=server.token, directory=tmp_path)
        for _ in range(100):
            with run.step() as step:
                step.log(loss=1.0)
    assert tried == [] and not server.released.is_set()
    assert run.finish(timeout=0).complete is False


def test_a_full_queue_drops_and_goes_on(server: WireServer, settings: Settings) -> None:
    run = Run(replace(settings, queue_rows=10), blank_registration("full queue"))
    # The recorder is kept from recording, as by a disk that does not answer.
    with run._pipeline.recording:
        for _ in range(30):
            with run.step() as step:
                step.log(loss=1.0)
        assert 15 <= run.guard.dropped <= 25
    report = run.finish()
    assert report.complete and report.rows_sent == 30 - report.rows_dropped == len(server.run.rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_synchronises_the_device(server: WireServer, settings: Settings) -> None:
    model = tiny_model().cuda()
    run = Run(settings, blank_registration("cuda"))
    run.watch(model)
    losses = []
    for index in range(50):
        loss = model(torch.randn(8, 32, device="cuda")).square().mean()
        loss.backward()
        losses.append(loss.detach())
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        try:
            with run.step() as step:
                step.log(loss=loss, double=loss.double() * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    report = run.finish()
    assert report.complete and report.errors == 0
    assert server.run.scalars("loss") == [float(loss) for loss in losses]
