"""Captured values are recorded once, at the step of the run, whatever the tracker counts."""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agent.helpers.loops import batch, regression, squares, update
from agent.helpers.wire_server import WireServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp8scope
from fp8scope.capture import active, capture
from fp8scope.capture.capture import ValueCapture
from fp8scope.run import Run

pytestmark = pytest.mark.usefixtures("online")


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    assert active.current() is None, "a capture goes on after its run"


@pytest.fixture
def training() -> Callable[..., tuple[Run, ValueCapture, Callable[[], None]]]:
    """Returns an attached run, its capture, and a function that trains a step."""

    def begin(**how: Any) -> tuple[Run, ValueCapture, Callable[[], None]]:
        model, optimizer = regression()
        run = fp8scope.attach(model, optimizer, overhead=None, **how)
        current = active.current()
        assert current is not None
        numbers = iter(range(10**6))

        def step() -> None:
            squares(model, next(numbers)).backward()  # type: ignore[no-untyped-call]
            update(optimizer)

        return run, current, step

    return begin


Training = Callable[..., tuple[Run, ValueCapture, Callable[[], None]]]


def points(server: WireServer, *names: str) -> list[tuple[int, dict[str, float]]]:
    """The step and these scalars of every row that has one."""
    rows = [
        (row["step"], {name: row["scalars"][name] for name in names if row["scalars"].get(name) is not None})
        for row in server.run.rows
    ]
    return [(step, scalars) for step, scalars in rows if scalars]


def test_it_works(server: WireServer, training: Training) -> None:
    run, current, step = training()
    for number in range(5):
        step()
        current.take("wandb", {"acc": number / 10, "nested": {"a": 1}}, number, separator=".")
    assert run.finish().errors == 0
    assert points(server, "acc", "tracker_step/wandb") == [
        (number + 1, {"acc": number / 10, "tracker_step/wandb": float(number)}) for number in range(5)
    ]
    assert server.run.scalars("nested.a") == [1.0] * 5
    facts = server.run.registration["environment"]["capture"]
    assert facts["values"] == {"wandb": 10}
    assert facts["steps"]["wandb"] == {"the steps of the run minus 1": ["acc", "nested.a"]}


def test_what_comes_before_the_first_step_is_step_0(server: WireServer, training: Training) -> None:
    run, current, step = training()
    for number in range(3):
        current.take("tensorboard", {"return": float(number)}, 100 * number)
    step()
    current.take("tensorboard", {"return": 9.0}, 300)
    run.finish()
    assert points(server, "return", "tracker_step/tensorboard") == [
        (0, {"return": 0.0, "tracker_step/tensorboard": 0.0}),
        (0, {"return": 1.0, "tracker_step/tensorboard": 100.0}),
        (0, {"return": 2.0, "tracker_step/tensorboard": 200.0}),
        (1, {"return": 9.0, "tracker_step/tensorboard": 300.0}),
    ]


def test_several_values_of_a_name_in_one_step_are_all_recorded(
    server: WireServer, training: Training
) -> None:
    """Episodes of reinforcement learning, or micro-batches: charts show the last one."""
    run, current, step = training()
    step()
    for number in range(4):
        current.take("tensorboard", {"return": float(number), "length": 7.0}, 10 * number)
    step()
    run.finish()
    assert points(server, "return", "length", "tracker_step/tensorboard") == [
        (1, {"return": float(number), "length": 7.0, "tracker_step/tensorboard": 10.0 * number})
        for number in range(4)
    ]
    assert server.run.scalars("loss")[-2:] != [None, None] and server.run.steps == [1, 1, 1, 1, 2]


def test_values_of_one_step_with_two_counts_stay_beside_their_own(
    server: WireServer, training: Training
) -> None:
    """A script that logs losses by iteration and accuracies by epoch."""
    run, current, step = training()
    for number in range(4):
        step()
        current.take("tensorboard", {"train": 1.0}, number)
        if number % 2:
            current.take("tensorboard", {"val": 2.0}, number // 2)
    run.finish()
    by_name = {
        name: [
            (step, scalars["tracker_step/tensorboard"])
            for step, scalars in points(server, name, "tracker_step/tensorboard")
            if name in scalars
        ]
        for name in ("train", "val")
    }
    assert by_name == {"train": [(1, 0), (2, 1), (3, 2), (4, 3)], "val": [(2, 0), (4, 1)]}


def test_a_value_that_two_trackers_get_is_recorded_once(server: WireServer, training: Training) -> None:
    run, current, step = training()
    for number in range(3):
        step()
        value = math.nan if number == 1 else number / 10
        current.take("wandb", {"x": value}, 5 * number)
        current.take("tensorboard", {"x": value}, number)
        current.take("tensorboard", {"y": 1.0}, number)
    run.finish()
    recorded = points(server, "x", "tracker_step/wandb", "tracker_step/tensorboard")
    assert [step for step, _ in recorded] == [1, 2, 3]
    assert [scalars["tracker_step/wandb"] for _, scalars in recorded] == [0, 5, 10]
    assert [scalars["tracker_step/tensorboard"] for _, scalars in recorded] == [0, 1, 2]
    assert str(recorded[1][1]["x"]).lower() == "nan"


def test_different_values_of_one_name_from_two_trackers_are_both_recorded(
    server: WireServer, training: Training
) -> None:
    run, current, step = training()
    step()
    current.take("wandb", {"x": 1.0}, 4)
    current.take("mlflow", {"x": 2.0}, 8)
    run.finish()
    assert [scalars["x"] for _, scalars in points(server, "x")] == [1.0, 2.0]


def test_what_an_outer_tracker_hands_on_is_recorded_once(server: WireServer, training: Training) -> None:
    """Also under another name, and if the inner tracker fails in between."""
    run, current, step = training()
    step()
    with (
        pytest.raises(OSError, match="disk"),
        current.around("accelerate", {"a": 1.0, "b": 2.0, "c": 2.0}, 1),
    ):
        current.take("wandb", {"run/a": 1.0, "run/b": 2.0}, 1)
        raise OSError("the tracker's disk is full")
    run.finish()
    (scalars,) = (scalars for _, scalars in points(server, "a", "b", "c", "run/a", "run/b"))
    assert scalars == {"run/a": 1.0, "run/b": 2.0, "c": 2.0}


def test_wandb_replaces_a_value_of_the_same_step(server: WireServer, training: Training) -> None:
    run, current, step = training()
    step()
    for value in (1.0, 2.0):
        current.take("wandb", {"x": value}, 0, replaces=True)
    run.finish()
    assert points(server, "x") == [(1, {"x": 2.0})]


def test_the_agents_own_loss_is_not_replaced(server: WireServer, training: Training) -> None:
    """A script often logs a mean, or a rounded loss. What is equal is recorded once."""
    run, current, step = training()
    model = torch.nn.Linear(32, 32)
    for number in range(4):
        step()
        current.take("wandb", {"loss": 100.0 + number, "tokens": 5}, number)
    run.finish()
    assert server.run.scalars("logged/loss") == [100.0, 101.0, 102.0, 103.0]
    assert server.run.scalars("logged/tokens") == [5.0] * 4
    losses = server.run.scalars("loss")
    assert None not in losses and all(loss is not None and loss < 10 for loss in losses)
    del model


def test_a_logged_loss_that_is_the_agents_is_recorded_once(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, overhead=None)
    current = active.current()
    assert current is not None
    for number in range(4):
        loss = squares(model, number)
        loss.backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        current.take("wandb", {"loss": loss.item(), "learning_rate": 0.1}, number)
    run.finish()
    assert None not in server.run.scalars("loss")
    assert all("logged/loss" not in row["scalars"] for row in server.run.rows)
    assert server.run.scalars("learning_rate") == [0.1] * 4


def test_run_log_takes_precedence_and_nothing_is_lost(server: WireServer, training: Training) -> None:
    run, current, step = training()
    step()
    run.log(x=1.0, same=5.0)
    current.take("wandb", {"x": 2.0, "same": 5.0}, 0)
    current.take("wandb", {"y": 3.0}, 0)
    run.log(y=4.0)
    step()
    run.finish()
    assert Counter(scalars["x"] for _, scalars in points(server, "x")) == Counter([1.0, 2.0])
    assert [scalars["y"] for _, scalars in points(server, "y")] == [3.0, 4.0]
    assert [scalars["same"] for _, scalars in points(server, "same")] == [5.0]
    assert server.run.steps == sorted(server.run.steps)


def test_what_is_no_number_is_counted_and_said_once(
    server: WireServer, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    run, current, step = training()
    step()
    with caplog.at_level(logging.INFO, "fp8scope"):
        for _ in range(3):
            current.take("wandb", {"image": object(), "note": "text", "x": 1.0}, 0, replaces=True)
    assert run.finish().errors == 0
    assert server.run.registration["environment"]["capture"]["left_out"] == {"wandb": {"object": 3, "str": 3}}
    assert len([record for record in caplog.records if "no numbers" in record.message]) == 1


def test_a_conflict_of_steps_is_said_in_one_line(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    run, current, step = training()
    with caplog.at_level(logging.INFO, "fp8scope"):
        for number in range(6):
            step()
            current.take("wandb", {"a": 1.0, "b": 2.0}, 1000 + number)
            current.take("tensorboard", {"c": 1.0}, number + 1)
    run.finish()
    (line,) = [record.message for record in caplog.records if "steps of its own" in record.message]
    assert line == (
        "wandb has steps of its own (a: the steps of the run plus 999). The run counts optimizer steps; "
        "tracker_step/wandb has those of wandb."
    )


def test_other_threads_values_have_rows_of_their_own(server: WireServer, training: Training) -> None:
    run, current, step = training()
    for number in range(5):
        step()
        thread = threading.Thread(target=current.take, args=("mlflow", {"x": float(number)}, number))
        thread.start()
        thread.join()
    assert run.finish().errors == 0
    assert points(server, "x") == [(number + 1, {"x": float(number)}) for number in range(5)]


def test_many_threads_at_once_lose_nothing(server: WireServer, training: Training) -> None:
    run, current, step = training()

    def log(name: str) -> None:
        for number in range(200):
            current.take(name, {f"{name}/x": float(number)}, number)

    threads = [threading.Thread(target=log, args=(f"t{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for number in range(50):
        step()
        current.take("main", {"main/x": float(number)}, number)
    for thread in threads:
        thread.join()
    assert run.finish().errors == 0
    for name, count in {"main": 50, **{f"t{index}": 200 for index in range(4)}}.items():
        values = sorted(scalars[f"{name}/x"] for _, scalars in points(server, f"{name}/x"))
        assert values == [float(number) for number in range(count)]


def test_a_resumed_run_has_no_step_0(server: WireServer, training: Training) -> None:
    """A row before the attempt's first step would hide the rows of the attempt before."""
    run, current, step = training()
    for number in range(3):
        step()
        current.take("wandb", {"x": 1.0}, number)
    state = run.state_dict()
    run.finish()
    again, current, step = training(resume=state)
    current.take("wandb", {"x": 2.0}, 3)
    step()
    current.take("wandb", {"x": 3.0}, 4)
    again.finish()
    assert points(server, "x") == [
        (1, {"x": 1.0}),
        (2, {"x": 1.0}),
        (3, {"x": 1.0}),
        (4, {"x": 2.0}),
        (4, {"x": 3.0}),
    ]


def test_short_steps_lose_nothing(server: WireServer) -> None:
    """Between light steps the agent's hooks are removed, and a value makes a step of the light one."""
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    current = active.current()
    assert current is not None
    for number in range(300):
        current.take("tensorboard", {"early": float(number)}, number)
        squares(model, number).backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        if number % 3 == 0:
            current.take("tensorboard", {"late": float(number)}, number)
    assert run.finish().errors == 0
    assert [scalars["early"] for _, scalars in points(server, "early")] == [float(n) for n in range(300)]
    assert points(server, "late") == [(n + 1, {"late": float(n)}) for n in range(0, 300, 3)]
    assert server.run.steps == sorted(server.run.steps)


def test_values_before_any_step_are_bounded(
    server: WireServer, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_WAITING", 10)
    run, current, step = training()
    for number in range(25):
        current.take("wandb", {"x": float(number)}, number)
    step()
    run.finish()
    assert [scalars["x"] for _, scalars in points(server, "x")] == [float(number) for number in range(25)]


def test_values_of_a_run_without_any_step_are_recorded(server: WireServer, training: Training) -> None:
    run, current, _ = training()
    current.take("wandb", {"x": 1.0}, 7)
    run.finish()
    assert points(server, "x", "tracker_step/wandb") == [(0, {"x": 1.0, "tracker_step/wandb": 7.0})]


def test_the_configuration_keeps_the_more_explicit_value(server: WireServer, training: Training) -> None:
    run, current, step = training(config={"lr": 0.1, "depth": 3})
    current.configure("wandb", {"lr": 0.2, "depth": "3", "api_key": "abcdefghijkl", "epochs": 4})
    current.configure("wandb", {"epochs": 5})
    current.summarise("wandb", {"best": 0.9})
    step()
    run.finish()
    assert server.run.registration["config"] == {
        "lr": 0.1, "depth": 3, "wandb": {"lr": 0.2}, "api_key": "[redacted]", "epochs": 5
    }  # fmt: skip
    assert server.run.registration["summary"] == {"best": 0.9}


def test_nothing_is_captured_after_the_end(server: WireServer, training: Training) -> None:
    run, current, step = training()
    step()
    run.finish()
    current.take("wandb", {"x": 1.0}, 0)
    current.configure("wandb", {"x": 1})
    assert points(server, "x") == [] and run.guard.errors == 0


def test_the_capture_follows_the_latest_run(server: WireServer) -> None:
    model, optimizer = regression()
    first = fp8scope.attach(model, optimizer, name="first")
    other_model, other = regression()
    second = fp8scope.attach(other_model, other, name="second")
    current = active.current()
    assert current is not None and current.run is second
    first.finish()
    assert active.current() is current
    second.finish()


def test_none_captures_nothing_and_names_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = regression()
    for wrong in ("tensorbored", ["wandb", 3], 5, ""):
        with pytest.raises(fp8scope.ConfigurationError, match="capture must be"):
            fp8scope.attach(model, optimizer, capture=wrong)  # type: ignore[arg-type]
    run = fp8scope.attach(model, optimizer, capture="none")
    assert active.current() is None
    run.finish()
    monkeypatch.setenv("FP8SCOPE_CAPTURE", "none")
    run = fp8scope.attach(model, optimizer)
    assert active.current() is None
    run.finish()
    run = fp8scope.attach(model, optimizer, capture=["wandb"])
    assert active.current() is not None
    run.finish()
    monkeypatch.setenv("FP8SCOPE_CAPTURE", "wandb, nothing")
    with pytest.raises(fp8scope.ConfigurationError, match="FP8SCOPE_CAPTURE must be"):
        fp8scope.attach(model, optimizer)


CALLS = st.lists(
    st.one_of(
        st.just("step"),
        st.tuples(
            st.sampled_from(["wandb", "tensorboard"]),
            st.sampled_from(["a", "b", "loss"]),
            st.floats(width=32),
            st.none() | st.integers(0, 20),
        ),
    ),
    max_size=40,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_any_order_of_calls_is_recorded_with_each_value_once(calls: list[Any], server: WireServer) -> None:
    """Of equal values of a name in a step as many as the tracker gave that gave most."""
    server.runs.clear()
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, overhead=None)
    current = active.current()
    assert current is not None
    given_values: dict[tuple[int, str, str], Counter[str]] = {}
    step = 0
    for call in calls:
        if call == "step":
            (model(batch(step)) - 1).square().mean().backward()
            update(optimizer)
            step += 1
        else:
            tracker, name, value, count = call
            current.take(tracker, {name: value}, count)
            given_values.setdefault((step, name, tracker), Counter())[str(value + 0.0)] += 1
    assert run.finish().errors == 0
    wanted: dict[tuple[int, str], Counter[str]] = {}
    for (at, name, _), counted in given_values.items():
        wanted[at, name] = wanted.get((at, name), Counter()) | counted
    recorded: dict[tuple[int, str], Counter[str]] = {}
    for row in server.run.rows:
        for name in ("a", "b", "logged/loss"):
            if row["scalars"].get(name) is not None:
                key = row["step"], name.removeprefix("logged/")
                recorded.setdefault(key, Counter())[str(float(row["scalars"][name]) + 0.0)] += 1
    assert recorded == wanted
    assert server.run.steps == sorted(server.run.steps)
