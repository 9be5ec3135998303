"""Loggers take part in the run of their process, and share one capture."""

import pytest
from agent.helpers.loops import regression, squares, update
from agent.helpers.wire_server import WireServer
from torch import autograd

import fp8scope
from fp8scope.capture import active
from fp8scope.capture.joining import join, joined_to
from fp8scope.integrations.run_values import RunValues
from fp8scope.process.open_runs import live_runs
from fp8scope.unrecorded import unrecorded

pytestmark = pytest.mark.usefixtures("online")


def points(server: WireServer, name: str) -> list[tuple[int, float]]:
    rows = [(row["step"], row["scalars"].get(name)) for row in server.run.rows]
    return [(step, value) for step, value in rows if value is not None]


def test_it_works(server: WireServer) -> None:
    """Two loggers without any other run: the first begins it, and its steps are those of the run."""
    first, second = RunValues("first", name="one run"), RunValues("second")
    second.configure({"a": 1})
    assert first.run is None and live_runs == []
    for step in range(3):
        first.log({"x": step, "same": 1.0}, 10 * step)
        # It counts differently, and gives one value that the first has given.
        second.log({"y": step, "same": 1.0}, step)
    assert first.run is second.run is live_runs[0]
    second.finish()
    assert first.run is not None and not first.run.finished
    first.finish()
    assert points(server, "x") == [(0, 0), (10, 1), (20, 2)] and points(server, "y") == [
        (0, 0),
        (10, 1),
        (20, 2),
    ]
    assert points(server, "same") == [(0, 1), (10, 1), (20, 1)]
    assert points(server, "tracker_step/second") == [(0, 0), (10, 1), (20, 2)]
    assert server.run.registration["config"] == {"a": 1} and server.run.finish["errors"] == 0


def test_a_value_that_is_given_again_belongs_to_its_step(server: WireServer) -> None:
    """Unlike that of a tracker whose step does not count on."""
    values = RunValues("framework")
    for step in (1, 2):
        values.log({"loss": step, "epoch": 0}, step)
        values.log({"val": step, "epoch": 0}, step)
        values.log({"val": 2 * step}, step)
    values.finish()
    assert points(server, "loss") == [(1, 1), (2, 2)]
    assert points(server, "val") == [(1, 1), (1, 2), (2, 2), (2, 4)]
    assert set(points(server, "epoch")) == {(1, 0), (2, 0)}


def test_values_belong_to_the_open_step_of_an_attached_run(server: WireServer) -> None:
    model, optimizer = regression()
    values = RunValues("framework", name="unused")
    values.configure({"lr": 0.1})
    run = fp8scope.attach(model, optimizer, overhead=None)
    for step in range(1, 4):
        autograd.backward(squares(model, step))
        update(optimizer)
        values.log({"train/x": step}, 100 * step)
    assert values.run is run and active.capture_of(run) is active.current()
    values.finish()
    assert not run.finished
    run.finish()
    assert points(server, "train/x") == [(1, 1), (2, 2), (3, 3)]
    assert points(server, "tracker_step/framework") == [(1, 100), (2, 200), (3, 300)]
    assert server.run.registration["config"] == {"lr": 0.1}


def test_training_again_records_in_the_next_run(server: WireServer) -> None:
    values = RunValues("framework")
    for name in ("first", "second"):
        run = fp8scope.init(name=name)
        values.log({"x": 1.0}, 1)
        assert values.run is run
        run.finish()
        # Without a run that goes on it records nothing, and begins none.
        values.log({"x": 2.0}, 2)
        assert values.run is None and live_runs == []
    stored = {run.registration["name"]: run.scalars("x") for run in server.runs.values()}
    assert stored == {"first": [1.0], "second": [1.0]}


def test_what_cannot_be_recorded_takes_no_values(server: WireServer) -> None:
    joined = joined_to(unrecorded(ImportError("no numpy")))
    joined.capture.take("framework", {"x": 1.0}, 1)
    disabled = join(lambda: fp8scope.init(mode="disabled"))
    disabled.capture.take("framework", {"x": 1.0}, 1)
    assert joined.run is not None and disabled.owns and server.runs == {}


def test_a_failure_of_the_framework_fails_the_run(server: WireServer) -> None:
    values = RunValues("framework")
    values.failed(ValueError("before the run"))
    values.log({"x": 1.0}, 1)
    values.failed(ValueError("as planned"))
    values.finish()
    assert server.run.finish["state"] == "failed" and "as planned" in server.run.finish["error"]


def test_secrets_of_a_configuration_are_left_out(server: WireServer) -> None:
    """DeepSpeed's and Megatron's configurations hold keys of trackers."""
    values = RunValues("framework")
    values.configure({"wandb": {"api_key": "0123456789abcdef"}, "lr": 0.1})
    values.log({"x": 1.0}, 1)
    values.configure({"token": "hf_SECRETSECRET"})
    values.finish()
    assert server.run.registration["config"]["lr"] == 0.1
    for secret in ("0123456789abcdef", "hf_SECRETSECRET"):
        assert secret not in str(server.run.registration)
