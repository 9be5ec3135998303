"""`run.step`, `step.log`, `run.log_eval`: what may be given, and what becomes of what may not."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


@pytest.fixture
def run(settings: Settings) -> Run:
    return Run(settings, blank_registration("a run"))


def test_it_works(run: Run, server: WireServer) -> None:
    with run.step(tokens=100) as step:
        step.log({"eval/loss": 2.5}, loss=3.0)
        step.log(loss=2.0)
    run.finish()
    (row,) = server.run.rows
    assert row["step"] == 1
    assert row["scalars"]["loss"] == 2.0 and row["scalars"]["eval/loss"] == 2.5
    assert row["scalars"]["tokens"] == 100
    speed = row["scalars"]["tokens_per_second"] * row["scalars"]["step_seconds"]
    assert speed == pytest.approx(100)
    assert abs(row["time"] - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.parametrize(
    "value",
    [
        3,
        3.0,
        np.float32(3),
        np.array([3.0]),
        np.array(3, dtype=np.int64),
        torch.tensor(3.0),
        torch.tensor([[3.0]]),
        torch.tensor(3),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor(3.0, dtype=torch.float64, requires_grad=True),
        torch.tensor(3.0, requires_grad=True) * 1,
    ],
    ids=repr,
)
def test_a_number_of_any_kind(value: Any, run: Run, server: WireServer) -> None:
    with run.step() as step:
        step.log(x=value)
    assert run.finish().errors == 0
    assert server.run.scalars("x") == [3.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan"))])
def test_what_is_not_finite_is_a_value(value: Any, run: Run, server: WireServer) -> None:
    with run.step() as step:
        step.log(loss=value)
    run.finish()
    (stored,) = server.run.scalars("loss")
    assert stored == float(value) or (stored is not None and math.isnan(stored) and math.isnan(value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", "3"),
        ("x", None),
        ("x", [1.0, 2.0]),
        ("x", torch.ones(2)),
        ("x", np.ones(3)),
        ("x", object()),
        ("", 1.0),
        ("a name", 1.0),
        ("x" * 129, 1.0),
        ("naïve", 1.0),
        (5, 1.0),
    ],
)
def test_what_is_no_number_is_left_out_and_counted(
    name: Any, value: Any, run: Run, server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with run.step() as step:
            step.log({name: value, "loss": 1.0})
    assert run.finish().errors == 3
    assert server.run.scalars("loss") == [1.0, 1.0, 1.0]
    assert server.run.scalars(name) == [None, None, None]
    assert len([m for m in caplog.messages if "logging" in m]) == 1


def test_a_loss_does_not_keep_its_graph_alive(run: Run) -> None:
    import weakref

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    with run.step() as step:
        loss = Node.apply(torch.ones((), requires_grad=True))  # type: ignore[no-untyped-call]
        graph = weakref.ref(loss.grad_fn)
        step.log(loss=loss)
        del loss
        assert graph() is None


def test_steps_count_from_one_and_can_be_numbered(run: Run, server: WireServer) -> None:
    for number in (None, None, 100, None, 50, None):
        with run.step(number=number):
            pass
    run.finish()
    assert sorted(server.run.steps) == [1, 2, 50, 51, 100, 101]


def test_a_negative_number_is_refused_and_counting_goes_on(run: Run, server: WireServer) -> None:
    for number in (None, -5, None):
        with run.step(number=number):
            pass
    assert run.finish().errors == 1
    assert server.run.steps == [1, 2, 3]


def test_tokens_from_a_tensor_are_refused_because_that_would_wait(run: Run, server: WireServer) -> None:
    with run.step(tokens=torch.tensor(5)) as step:  # type: ignore[arg-type]
        step.log(loss=1.0)
    assert run.finish().errors == 1
    assert server.run.scalars("tokens") == [None] and server.run.scalars("loss") == [1.0]


def test_no_more_values_than_the_server_takes(
    run: Run, server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    with run.step() as step:
        step.log({f"x{index}": index for index in range(2005)})
        step.log({"nested": {f"x{index}": index for index in range(5)}})
        # A name that the step has already keeps its last value.
        step.log(x0=7)
    assert run.finish().errors >= 5
    assert len(server.run.rows[0]["scalars"]) <= 2000
    assert server.run.scalars("x0") == [7.0]
    assert len([m for m in caplog.messages if "a step holds at most" in m]) == 1


def test_values_without_any_step_are_pointed_out_while_it_trains(
    run: Run, server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    run.log(setup=1.0)
    assert "no step" not in caplog.text
    for loss in (3.0, 2.0, 1.0):
        run.log(loss=loss)
    assert caplog.text.count("there is no step that values could be recorded with") == 1
    with run.step():
        pass
    run.finish()
    assert server.run.scalars("loss") == [1.0] and server.run.scalars("setup") == [1.0]


def test_values_for_earlier_steps_are_counted_and_pointed_out_once(
    run: Run, server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (5, 6, 1, 2, 3, 7):
        run.log({"loss": 1.0}, step=number)
    assert run.finish().errors == 3
    assert server.run.steps == [5, 6, 7]
    assert len([m for m in caplog.messages if "earlier step" in m]) == 1


@pytest.mark.parametrize(
    "items", [[1, 0, 1], (True, False, True), np.array([1, 0, 1]), torch.tensor([1, 0, 1])]
)
def test_an_evaluation_of_any_sequence(items: Any, run: Run, server: WireServer) -> None:
    run.log_eval("heldout", "accuracy", items, step=7, item_ids=list("abc"), clusters=["x", "x", "y"])
    assert run.finish().errors == 0
    (stored,) = server.run.evaluations
    assert stored["items"] == [1.0, 0.0, 1.0] and stored["step"] == 7 and stored["kind"] == "proportion"
    assert stored["item_ids"] == ["a", "b", "c"] and stored["clusters"] == ["x", "x", "y"]


def test_the_precision_and_the_margin_of_an_evaluation(run: Run, server: WireServer) -> None:
    run.log_eval("heldout", "accuracy", [1, 0], precision="fp8", margin=0.02)
    run.log_eval("heldout", "accuracy", [1, 0])
    assert run.finish().errors == 0
    first, second = server.run.evaluations
    assert (first["precision"], first["margin"]) == ("fp8", 0.02)
    assert "precision" not in second and "margin" not in second


@pytest.mark.parametrize(
    ("items", "options"),
    [
        ([], {}),
        ([0.5], {}),
        ([float("nan")], {"kind": "mean"}),
        (["x"], {"kind": "mean"}),
        ([1.0], {"kind": "median"}),
        ([1.0, 0.0], {"item_ids": ["only one"]}),
        ([1.0, 0.0], {"clusters": ["only one"]}),
        ([1.0, 0.0], {"item_ids": ["twice", "twice"]}),
        ([1.0], {"item_ids": ["x" * 129]}),
        ([1.0], {"step": -1}),
        ([1.0], {"precision": "int8"}),
        ([1.0], {"margin": 0.0}),
        ([1.0], {"margin": float("nan")}),
        ([1.0] * 100_001, {}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_evaluation_that_would_be_refused_is_told_here(
    items: Any, options: dict[str, Any], run: Run, server: WireServer
) -> None:
    run.log_eval("heldout", "accuracy", items, **options)
    assert run.finish().errors == 1 and server.run.evaluations == []


def test_a_run_that_has_ended_takes_nothing_more(run: Run, server: WireServer) -> None:
    first = run.finish()
    with run.step() as step:
        step.log(loss=1.0)
    run.log_eval("heldout", "accuracy", [1])
    assert run.finish() is first
    assert server.run.rows == [] and server.run.evaluations == []


def test_a_disabled_run_records_nothing(tmp_path: Any) -> None:
    import fp8scope

    with fp8scope.init(mode="disabled", directory=tmp_path) as run, run.step() as step:
        step.log(loss=1.0)
    assert run.finish().complete and list(tmp_path.iterdir()) == []
