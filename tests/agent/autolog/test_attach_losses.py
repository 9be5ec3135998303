"""Non-finite losses are stored unchanged; a warning asks the script to log losses that cannot be observed."""

import math
from typing import Any

import pytest
import torch
from agent.helpers.loops import regression, squares, train, update
from agent.helpers.wire_server import WireServer
from torch import Tensor

import fp8scope
from fp8scope.autolog import loss_capture

pytestmark = pytest.mark.usefixtures("online")
NAN, INF = math.nan, math.inf
NO_LOSS = "run.log(loss="


def same(stored: list[float | None], expected: list[float]) -> None:
    assert len(stored) == len(expected), stored
    for seen, value in zip(stored, expected, strict=True):
        assert seen is not None and seen == pytest.approx(value, rel=1e-6, nan_ok=True)


def test_it_works(server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    expected = train(model, optimizer, 3)
    assert run.finish().errors == 0
    same(server.run.scalars("loss"), expected)
    assert NO_LOSS not in caplog.text


LAST_OPERATIONS: dict[str, Any] = {
    "times NaN": lambda loss: loss * NAN,
    "times Inf": lambda loss: loss * INF,
    "times -Inf": lambda loss: -INF * loss,
    "over NaN": lambda loss: loss / NAN,
    "over Inf": lambda loss: loss / INF,
    "over -Inf": lambda loss: loss / -INF,
    "times 0": lambda loss: loss * 0,
    "over 0": lambda loss: loss / 0,
    "over -1": lambda loss: loss / -1,
    "times -0.5": lambda loss: loss * -0.5,
    "times the smallest number": lambda loss: loss * 5e-324,
    "over the largest number": lambda loss: loss / 1e308,
    "times a tensor of NaN": lambda loss: loss * torch.tensor(NAN),
    "over a tensor of Inf": lambda loss: loss / torch.tensor(INF),
    "over a tensor of one element": lambda loss: loss / torch.tensor([INF]),
    "Inf - Inf": lambda loss: loss * INF - loss * INF,
    "in float64": lambda loss: loss.double() * NAN,
    "in bfloat16": lambda loss: loss.bfloat16() * INF,
    "of a complex number": lambda loss: (loss * complex(0, INF)).imag,
    "of an integer tensor": lambda loss: loss / torch.tensor(4),
    "of a tensor with a gradient": lambda loss: loss / torch.tensor(NAN, requires_grad=True),
}


@pytest.mark.parametrize("last", LAST_OPERATIONS)
def test_stores_non_finite_losses_unchanged_after_any_operation(last: str, server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    loss = LAST_OPERATIONS[last](squares(model, 0))
    expected = loss.item()
    loss.backward()
    update(optimizer)
    assert run.finish().errors == 0
    same(server.run.scalars("loss"), [expected])


@pytest.mark.parametrize("factor", [NAN, INF])
def test_accumulated_losses_with_a_non_finite_factor(factor: float, server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    for number in range(4):
        for part in range(2):
            loss = squares(model, part) / 2
            (loss * factor if number == part == 1 else loss).backward()  # type: ignore[no-untyped-call]
        update(optimizer)
    assert run.finish().errors == 0
    stored = server.run.scalars("loss")
    # The divisor known from earlier steps is still used afterwards.
    assert stored[0] is not None and stored[0] == pytest.approx(
        sum(squares(regression()[0], n).item() for n in (0, 1)) / 2
    )
    assert not math.isfinite(stored[1] or 0.0)
    assert len(stored) == 4


def test_a_scaled_loss_is_stored_unscaled_even_where_its_factor_is_infinite(server: WireServer) -> None:
    model, optimizer = regression()
    scaler = torch.amp.GradScaler("cpu", init_scale=INF)
    run = fp8scope.attach(model, optimizer, scaler=scaler)
    loss = squares(model, 0)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert run.finish().errors == 0
    same(server.run.scalars("loss"), [loss.item()])


def test_an_internal_failure_is_counted_and_keeps_the_loss(
    server: WireServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(loss: Tensor) -> float:
        raise RuntimeError("planned")

    monkeypatch.setattr(loss_capture, "divisor", broken)
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    expected = train(model, optimizer, 3)
    report = run.finish()
    assert report.errors == 3 and server.run.finish["errors"] == 3
    same(server.run.scalars("loss"), expected)
    assert caplog.text.count("RuntimeError: planned") == 1


def test_losses_that_cannot_be_combined_affect_only_their_step(
    server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    combine = loss_capture.combine
    calls = []

    def fails_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planned")
        return combine(*arguments)

    monkeypatch.setattr("fp8scope.autolog.attachment.combine", fails_once)
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    expected = train(model, optimizer, 3)
    assert run.finish().errors == 1
    stored = server.run.scalars("loss")
    assert stored[1] is None
    same(stored[::2], expected[::2])


def test_losses_of_two_types_are_averaged(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    first, second = squares(model, 0), squares(model, 1).double()
    first.backward()  # type: ignore[no-untyped-call]
    second.backward()  # type: ignore[no-untyped-call]
    update(optimizer)
    assert run.finish().errors == 0
    same(server.run.scalars("loss"), [(first.item() + second.item()) / 2])


# Losses that cannot be observed


def by_vector(model: Any, number: int) -> None:
    loss = squares(model, number).expand(4) * 1.0
    loss.backward(torch.ones(4))  # type: ignore[no-untyped-call]


def by_a_given_gradient(model: Any, number: int) -> None:
    squares(model, number).backward(torch.tensor(1.0))  # type: ignore[no-untyped-call]


def by_grad(model: Any, number: int) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(squares(model, number), parameters), strict=True
    ):
        parameter.grad = gradient


def by_several(model: Any, number: int) -> None:
    torch.autograd.backward([squares(model, number), squares(model, number + 1)])


@pytest.mark.parametrize("way", [by_vector, by_grad, by_several])
def test_warns_once_about_steps_without_a_loss(
    way: Any, server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    for number in range(4):
        way(model, number)
        update(optimizer)
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3, 4] and server.run.scalars("loss") == [None] * 4
    assert caplog.text.count(NO_LOSS) == 1 and "step 1" in caplog.text


def test_a_scalar_with_an_explicit_gradient_is_not_taken_as_the_loss(
    server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    by_a_given_gradient(model, 0)
    update(optimizer)
    run.finish()
    assert caplog.text.count(NO_LOSS) == 1


@pytest.mark.parametrize("way", [by_vector, by_grad])
def test_does_not_warn_if_the_script_logs_the_loss(
    way: Any, server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    for number in range(3):
        way(model, number)
        update(optimizer)
        run.log(loss=float(number))
    assert run.finish().errors == 0
    assert server.run.scalars("loss") == [0.0, 1.0, 2.0] and NO_LOSS not in caplog.text


def test_warns_about_an_unseen_loss_after_steps_with_a_loss(
    server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    train(model, optimizer, 2)
    by_grad(model, 2)
    update(optimizer)
    run.finish()
    assert caplog.text.count(NO_LOSS) == 1 and "step 3" in caplog.text
