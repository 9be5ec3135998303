"""From a training loop to the server: what was logged is what is stored."""

from dataclasses import replace

from agent.helpers.models import tiny_model, train_step
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def begin(settings: Settings, name: str = "a run") -> Run:
    return Run(settings, blank_registration(name))


def test_it_works(server: WireServer, settings: Settings) -> None:
    model = tiny_model()
    run = begin(replace(settings, introduce_seconds=60))
    assert run.watch(model) == 6
    losses = []
    for index in range(20):
        with run.step(tokens=128) as step:
            loss = train_step(model)
            losses.append(float(loss.detach()))
            step.log(loss=loss, learning_rate=0.1 / (index + 1))
    run.log_eval("heldout", "accuracy", [1, 0, 1, 1], item_ids=["a", "b", "c", "d"])
    report = run.finish()

    stored = server.run
    assert report.complete and report.errors == 0
    assert stored.steps == list(range(1, 21))
    assert stored.scalars("loss") == losses
    assert stored.scalars("tokens") == [128.0 * n for n in range(1, 21)]
    assert all(seconds and seconds > 0 for seconds in stored.scalars("step_seconds"))
    assert (report.rows_sent, report.points_sent) == (20, stored.points)
    # Per step every scalar, and 6 tensors of 7 statistics; in the first, a sampled one, 5 more of each, and
    # the kurtosis of each layer's input.
    scalars = sum(value is not None for row in stored.rows for value in row["scalars"].values())
    assert stored.points == scalars + 20 * 6 * 7 + 6 * 5 + 2
    named = {"loss", "learning_rate", "step_seconds", "tokens", "tokens_per_second"}
    assert named <= set(stored.rows[0]["scalars"])
    assert {histogram["step"] for histogram in stored.histograms} == {1} and len(stored.histograms) == 6
    assert stored.finish["rows_sent"] == 20 and stored.finish["points_sent"] == stored.points
    assert stored.evaluations[0]["items"] == [1.0, 0.0, 1.0, 1.0] and stored.evaluations[0]["step"] == 20
    assert stored.registration["precision"] == "fp8"
    assert stored.registration["recipe"]["recipe"] == "DelayedScaling"
    assert not run.directory.exists() and not settings.directory.joinpath(run.id).exists()


def test_a_run_shows_up_before_its_first_step(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    wait_until(lambda: run.url, "the run's address")
    assert run.url == f"{server.url}/runs/{run.id}" and server.run.rows == []
    run.finish()
