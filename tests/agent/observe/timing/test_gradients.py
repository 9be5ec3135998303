"""Learning rates and the gradients' norm: exact, unscaled, told apart from clipping, without a wait."""

import math
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures
from fp8scope.observe.timing.gradients import MAX_GROUPS, gradient_norm, inner_optimizer, learning_rates
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 8)).square().sum()
    return loss


def true_norm(model: nn.Module) -> float:
    """By the definition, in float64."""
    return math.sqrt(
        sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    )


def test_it_works(server: WireServer, settings: Settings) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = Run(settings, blank_registration("gradients"))
    run.watch(model, optimizer)
    expected = []
    for _ in range(3):
        with run.step():
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            expected.append(true_norm(model))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert run.finish().errors == 0
    assert server.run.scalars("learning_rate") == [0.1, 0.05, 0.025]
    assert server.run.scalars("grad_norm") == pytest.approx(expected, rel=1e-6)


def test_records_the_norm_before_and_after_clipping(server: WireServer, settings: Settings) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(settings, blank_registration("clipped"))
    run.watch(model, optimizer)
    with run.step() as step:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        before = true_norm(model)
        step.log(grad_norm=clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    run.finish()
    assert before > 1
    assert server.run.scalars("grad_norm") == pytest.approx([before], rel=1e-6)
    assert server.run.scalars("grad_norm_applied") == pytest.approx([0.5], rel=1e-4)


def test_values_that_the_script_logs_take_precedence(server: WireServer, settings: Settings) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(settings, blank_registration("own"))
    run.watch(model, optimizer)
    with run.step() as step:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step.log(learning_rate=7.0, time_forward=9.0)
    run.finish()
    assert server.run.scalars("learning_rate") == [7.0] and server.run.scalars("time_forward") == [9.0]


def test_norm_of_gradients_of_several_dtypes() -> None:
    model = small_model()
    model[0].to(torch.bfloat16)
    model[2].to(torch.float64)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 3
    found = gradient_norm(torch.optim.SGD(model.parameters(), lr=0.1))
    assert found is not None and found[1] is False
    assert float(found[0]) == pytest.approx(true_norm(model), rel=1e-5)


def test_norm_of_float16_gradients_does_not_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(100, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 3000.0)
    found = gradient_norm(torch.optim.SGD([parameter], lr=0.1))
    assert found is not None and float(found[0]) == pytest.approx(30_000, rel=1e-3)


def test_an_infinite_gradient_gives_an_infinite_norm() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, math.inf, 1.0])
    found = gradient_norm(torch.optim.SGD([parameter], lr=0.1))
    assert found is not None and math.isinf(float(found[0]))


@pytest.mark.parametrize("unscale_first", [True, False])
def test_gradients_are_unscaled(unscale_first: bool) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    measures = Measures(Guard())
    measures.watch(model, optimizer)
    measures.begin()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    expected = true_norm(model)
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()  # type: ignore[no-untyped-call]
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    reading = measures.end({})
    assert reading is not None and reading.read()["grad_norm"] == pytest.approx(expected, rel=1e-5)
    measures.close()


def test_works_with_a_fused_optimizer_that_unscales() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 512.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.grad_scale = torch.tensor(256.0)  # type: ignore[attr-defined]
    found = gradient_norm(optimizer)
    assert found is not None and float(found[0]) == pytest.approx(4.0)


def test_a_step_that_the_scaler_skips_has_no_norm() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    measures = Measures(Guard())
    measures.watch(model, optimizer)
    measures.begin()
    (loss_of(model) * scaler.get_scale() * math.inf).backward()  # type: ignore[no-untyped-call]
    scaler.scale(torch.zeros((), requires_grad=True))
    scaler.step(optimizer)
    reading = measures.end({})
    assert reading is not None and "grad_norm" not in reading.read()
    measures.close()


def test_two_optimizers_share_one_norm_and_number_groups_consecutively() -> None:
    first, second = small_model(), small_model()
    groups: list[dict[str, Any]] = [{"params": [*layer.parameters()]} for layer in (first[0], first[2])]
    groups[1]["lr"] = 2.0
    optimizers = [
        torch.optim.SGD(groups, lr=1.0),
        torch.optim.SGD(second.parameters(), lr=3.0),
    ]
    measures = Measures(Guard())
    measures.watch(first, optimizers[0])
    measures.watch(second, optimizers[1])
    measures.begin()
    for model, optimizer in zip((first, second), optimizers, strict=True):
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    reading = measures.end({})
    assert reading is not None
    found = reading.read()
    assert {name: found[name] for name in found if name.startswith("learning")} == {
        "learning_rate": 1.0,
        "learning_rate/group1": 2.0,
        "learning_rate/group2": 3.0,
    }
    assert found["grad_norm"] == pytest.approx(math.hypot(true_norm(first), true_norm(second)), rel=1e-5)
    measures.close()


def test_records_a_learning_rate_tensor() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), capturable=False, foreach=False)
    measures = Measures(Guard())
    measures.watch(model, optimizer)
    measures.begin()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    reading = measures.end({})
    assert reading is not None and reading.read()["learning_rate"] == 0.25
    measures.close()


def test_limits_the_number_of_groups() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(100)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": float(i)} for i, p in enumerate(parameters)])
    rates = learning_rates(optimizer)
    assert len(rates) == MAX_GROUPS and rates[f"learning_rate/group{MAX_GROUPS - 1}"] == MAX_GROUPS - 1


def test_ignores_sparse_and_missing_gradients() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    assert gradient_norm(optimizer) is None
    table(torch.tensor([1, 2])).sum().backward()
    assert gradient_norm(optimizer) is None


def test_unwraps_a_trainers_optimizer() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert inner_optimizer(Wrapper(Wrapper(optimizer))) is optimizer
    assert inner_optimizer(optimizer) is optimizer


class Strange(torch.Tensor):
    """A gradient of which its part on this rank cannot be had."""

    def to_local(self) -> torch.Tensor:
        raise ZeroDivisionError


def test_an_unreadable_gradient_is_counted_without_stopping_training() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard()
    measures = Measures(guard)
    measures.watch(model, optimizer)
    measures.begin()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    (weight, *_) = model.parameters()
    before = weight.detach().clone()
    assert weight.grad is not None
    weight.grad = weight.grad.as_subclass(Strange)
    optimizer.step()
    assert guard.errors == 1 and not torch.equal(before, weight)
    measures.close()
