"""The training thread waits for nothing: no `.item()`, no copy that blocks, no network, no full queue."""

import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from agent.helpers.faulty_http import Fault
from agent.helpers.models import tiny_model, train_step
from agent.helpers.wire_server import WireServer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8scope
from fp8scope.config import Settings
from fp8scope.observe.collector import Collector
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope.scalars import host_number
from fp8scope_kernels import MXFP8, BlockScaling, CurrentScaling, DelayedScaling

ROOT = Path(__file__).resolve().parents[3]
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


class OurWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operators of WAITING that the agent calls: from hooks, the autograd engine or the step.

    Operators that the training calls itself do not count. Nor do the kernels' reads of a scale on the CPU,
    which do not wait. On a device the kernels use another path, which tests/gpu covers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITING and (place := _place_of_ours(sys._getframe(1))):
            self.found.append(f"{func._schema.name} at {place}")
        return func(*args, **(kwargs or {}))


def _place_of_ours(frame: FrameType | None) -> str:
    """The innermost line of the project that is being executed, where that is the agent's; else nothing."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        # A mode that counts operators stands between them and who asked for them.
        passes_on = frame.f_code.co_name == "__torch_dispatch__"
        if "torch" not in path.parts and path.is_relative_to(ROOT) and not passes_on:
            ours = path.is_relative_to(ROOT / "agent") and "demo" not in path.parts
            return f"{path.name}:{frame.f_lineno}" if ours else ""
        frame = frame.f_back
    return ""


def test_the_finder_would_see_ours() -> None:
    careless = compile("x.item()", str(ROOT / "agent" / "fp8scope" / "careless.py"), "exec")
    with OurWaits() as waits:
        float(torch.ones(()))
        host_number(torch.ones(()))
        assert waits.found == []
        exec(careless, {"x": torch.ones(())})
    assert waits.found == ["aten::_local_scalar_dense at careless.py:1"]


def _torchao_model() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True)
    model: nn.Module = convert_to_float8_training(_plain_model(), config=config)
    return model


def _plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def _fp8_model(recipe: Any) -> nn.Module:
    model = _plain_model()
    fp8scope.convert(model, recipe)
    return model


WATCHED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "delayed": (lambda: _fp8_model(DelayedScaling(history_length=4)), {}),
    "current": (lambda: _fp8_model(CurrentScaling()), {}),
    "blocks": (lambda: _fp8_model(MXFP8()), {}),
    "high precision": (_plain_model, {}),
    "shadow, delayed": (_plain_model, {"shadow": DelayedScaling()}),
    "shadow, blocks": (_plain_model, {"shadow": BlockScaling()}),
    "torchao": (_torchao_model, {}),
}


@pytest.mark.parametrize("kind", WATCHED)
def test_no_source_and_no_measure_waits(kind: str, server: WireServer, settings: Settings) -> None:
    make, options = WATCHED[kind]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Run(settings, blank_registration(kind))
    assert run.watch(model, optimizer, every=2, **options) > 0
    for _ in range(5):
        with OurWaits() as waits, run.step(tokens=8) as step:
            loss = model(torch.randn(8, 32)).square().mean()
            loss.backward()
            step.log(loss=loss, grad_norm=nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        assert waits.found == []
    report = run.finish()
    assert report.complete and report.errors == 0
    assert all(value is not None for value in server.run.scalars("grad_norm_applied"))


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
    with run.session.writers.pipeline.recording:
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Run(settings, blank_registration("cuda"))
    run.watch(model, optimizer)
    losses = []
    for index in range(50):
        x = torch.randn(8, 32, device="cuda")
        # The first step counts operations, and the allocator may wait in it.
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        try:
            with run.step() as step:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                step.log(loss=loss, double=loss.double() * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    report = run.finish()
    assert report.complete and report.errors == 0
    assert server.run.scalars("loss") == [float(loss) for loss in losses]
