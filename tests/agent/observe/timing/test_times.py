"""The times of a step's parts: each is exact, and together they add up to the step's time."""

import copy
import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agent.helpers.ticking import Loop, Model, Sgd, Slow, x
from agent.helpers.wire_server import WireServer
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures
from fp8scope.observe.timing.clock import PHASES
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def test_it_works(loop: Loop, clock: Callable[[float], None]) -> None:
    loop.measures.begin()
    clock(7)
    out = loop.model(x())
    clock(0.5)
    out.sum().backward()
    clock(0.25)
    loop.optimizer.step()
    clock(0.125)
    assert loop.times() == {"data": 7, "forward": 2, "backward": 3, "optimizer": 5, "other": 0.875}


def test_time_between_steps_counts_as_waiting_for_data(loop: Loop, clock: Callable[[float], None]) -> None:
    for wait in (1.0, 11.0):
        clock(wait)
        loop.measures.begin()
        loop.model(x()).sum().backward()
        loop.optimizer.step()
        times = loop.times()
    assert times["data"] == 11 and sum(times.values()) == 11 + 2 + 3 + 5


def test_accumulated_micro_batches_add_up(loop: Loop, clock: Callable[[float], None]) -> None:
    loop.measures.begin()
    for _ in range(4):
        clock(1)
        loop.model(x()).sum().backward()
    loop.optimizer.step()
    assert loop.times() == {"data": 4, "forward": 8, "backward": 12, "optimizer": 5, "other": 0}


def test_evaluation_time_is_neither_forward_nor_data(loop: Loop, clock: Callable[[float], None]) -> None:
    loop.measures.begin()
    clock(20)
    loop.model.eval()
    with torch.no_grad():
        loop.model(x())
        clock(30)
        loop.model(x())
    loop.model.train()
    clock(40)
    loop.model(x()).sum().backward()
    loop.optimizer.step()
    times = loop.times()
    assert times == {"data": 0, "forward": 2, "backward": 3, "optimizer": 5, "other": 94}
    loop.measures.begin()
    clock(6)
    loop.model(x()).sum().backward()
    assert loop.times()["data"] == 6


def test_optimizer_time_counts_as_other_if_only_the_model_is_watched(clock: Callable[[float], None]) -> None:
    model, measures = Model(), Measures(Guard())
    measures.watch(model)
    optimizer = Sgd(model.parameters(), lr=0.1)
    measures.begin()
    model(x()).sum().backward()
    optimizer.step()
    reading = measures.end({})
    assert reading is not None
    found = reading.read()
    assert (found["time_forward"], found["time_backward"], found["time_other"]) == (2, 3, 5)
    assert found["time_optimizer"] == 0 and "learning_rate" not in found and "grad_norm" not in found
    measures.close()


def test_recomputation_counts_as_backward(
    clock: Callable[[float], None],
) -> None:
    class SlowFirst(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(Slow.apply(x, 2.0, 3.0))  # type: ignore[no-untyped-call]
            return y

    model, measures = SlowFirst(), Measures(Guard())
    measures.watch(model)
    measures.begin()
    # The whole model is called again inside of the backward pass.
    checkpoint(model, x().requires_grad_(), use_reentrant=False).sum().backward()
    reading = measures.end({})
    assert reading is not None
    found = reading.read()
    assert (found["time_forward"], found["time_backward"]) == (2, 5)
    measures.close()


def test_nested_models_are_timed_once(clock: Callable[[float], None]) -> None:
    inner = Model()
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    measures = Measures(Guard())
    measures.watch(outer)
    measures.watch(inner)
    measures.begin()
    outer(x()).sum().backward()
    reading = measures.end({})
    assert reading is not None and reading.read()["time_forward"] == 2
    measures.close()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, None),
        lambda y: {"loss": y.sum(), "logits": y},
        lambda y: [[y]],
        lambda y: {"hidden": (y.detach(), y)},
    ],
    ids=["tuple", "mapping", "nested", "second"],
)
def test_times_models_with_any_output(wrap: Callable[[Any], Any], clock: Callable[[float], None]) -> None:
    class Wrapping(Model):
        def forward(self, x: torch.Tensor) -> Any:
            self.out = super().forward(x)
            return wrap(self.out)

    model, measures = Wrapping(), Measures(Guard())
    measures.watch(model)
    measures.begin()
    model(x())
    model.out.sum().backward()  # type: ignore[no-untyped-call]
    reading = measures.end({})
    assert reading is not None
    found = reading.read()
    # A gradient that does not come through what was returned is still other's time, never lost.
    assert found["time_forward"] == 2 and found["time_backward"] + found["time_other"] == 3
    measures.close()


def test_a_failed_forward_pass_does_not_affect_later_times(
    loop: Loop, clock: Callable[[float], None]
) -> None:
    loop.measures.begin()
    with pytest.raises(RuntimeError):
        loop.model(torch.ones(2, 3))
    clock(4)
    loop.model(x()).sum().backward()
    times = loop.times()
    assert (times["forward"], times["backward"]) == (2, 3) and sum(times.values()) == 9


def test_an_empty_step_has_no_times(loop: Loop) -> None:
    loop.measures.begin()
    assert loop.times() == {}


def test_a_copy_of_the_model_measures_nothing(loop: Loop, clock: Callable[[float], None]) -> None:
    copies = [copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))]
    loop.measures.begin()
    for one in copies:
        one(x()).sum().backward()
    assert loop.times() == {}
    optimizer = copy.deepcopy(loop.optimizer)
    optimizer.step()
    assert loop.times() == {}


def test_finishing_removes_all_hooks(loop: Loop) -> None:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    assert any(getattr(loop.model, name) for name in hooks)
    loop.measures.close()
    assert not any(getattr(loop.model, name) for name in hooks)
    assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks
    assert loop.measures.end({}) is None


def test_watching_twice_has_no_effect(loop: Loop, clock: Callable[[float], None]) -> None:
    loop.measures.watch(loop.model, loop.optimizer)
    loop.measures.begin()
    loop.model(x()).sum().backward()
    loop.optimizer.step()
    assert loop.times() == {"data": 0, "forward": 2, "backward": 3, "optimizer": 5, "other": 0}


def test_the_parts_of_a_real_step_add_up_to_its_time(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "tick", staticmethod(lambda units: time.sleep(units / 100)), raising=False)
    model = Model()
    optimizer = Sgd(model.parameters(), lr=0.1)
    run = Run(settings, blank_registration("times"))
    run.watch(model, optimizer)
    began = time.perf_counter()
    for _ in range(3):
        time.sleep(0.03)
        with run.step():
            model(x()).sum().backward()
            optimizer.step()
    whole = time.perf_counter() - began
    assert run.finish().errors == 0
    columns = {name: [v for v in server.run.scalars(name) if v is not None] for name in PHASES}
    assert all(len(column) == 3 for column in columns.values())
    total = sum(itertools.chain.from_iterable(columns.values()))
    assert total <= whole
    assert min(columns["time_forward"]) >= 0.02 and min(columns["time_backward"]) >= 0.03
    assert min(columns["time_optimizer"]) >= 0.05 and min(columns["time_data"][1:]) >= 0.03
