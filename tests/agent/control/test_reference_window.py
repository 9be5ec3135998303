"""BF16 reference windows: they see what there is to see, and the run does not notice them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.reference_training import (
    EVERY,
    STEPS,
    WINDOW,
    Training,
    begin,
    equal,
    explicit,
    plain,
    window,
)
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.control.loss_comparison import compare
from fp8scope.control.reference_window import ReferenceWindow
from fp8scope_kernels import Fp8AdamW, fp8_layers


def test_it_works(server: WireServer, settings: Settings) -> None:
    """Two windows; and losses and state are those of a training without any, bit for bit."""
    training, run = Training(), begin(settings)
    run.watch(training.model)
    losses = explicit(training, run, window(run, training))
    state = training.state()
    run.finish()
    expected_losses, expected_state = plain(settings)
    assert equal(losses, expected_losses), "not the losses of a training without windows"
    assert equal(state, expected_state), "not the state of a training without windows"
    reports = server.run.reports_of("reference")
    assert [(one["step"], len(one["bf16"]), len(one["fp8"])) for one in reports] == [(9, 4, 4), (17, 4, 4)]
    for report, first in zip(reports, (8, 16), strict=True):
        assert report["fp8"] == [float(loss) for loss in losses[first : first + WINDOW]], (
            "the run's own losses"
        )
        assert report["bf16"] != report["fp8"]
        assert report["bf16"][0] == pytest.approx(report["fp8"][0], rel=0.05), "from the same state"
        verdict = compare(report["fp8"], report["bf16"], report["tolerance"])
        assert report["delta"] == verdict.delta and report["noise"] == verdict.noise
        assert report["verdict"] == ("within" if verdict.within else "over")
        assert (report["policy"], report["action"], report["layers"]) == ("report", "", 2)
        size = sum(p.numel() for p in training.model.parameters()) * 4
        assert report["kept_bytes"] > 2 * 3 * size, "weights and two moments, twice"


@pytest.mark.parametrize("steps_inside", [False, True])
def test_bit_for_bit_in_other_loops(steps_inside: bool, server: WireServer, settings: Settings) -> None:
    """Without a step that the run knows of; and with it inside of the training step."""
    training, run = Training(), begin(settings)
    step = training.step
    if steps_inside:

        def with_step(batch: torch.Tensor) -> torch.Tensor:
            with run.step() as open_step:
                loss = step(batch)
                open_step.log(loss=loss)
            return loss

        training.step = with_step  # type: ignore[method-assign]
    train_step = window(run, training)
    losses = [train_step(batch) for batch in training.batches()]
    state = training.state()
    run.finish()
    expected_losses, expected_state = plain(settings)
    assert equal(losses, expected_losses) and equal(state, expected_state)
    assert len(server.run.reports_of("reference")) == 2


def test_bit_for_bit_where_steps_are_found_by_themselves(server: WireServer, settings: Settings) -> None:
    """The attachment's step is still open while the window's other arm trains."""
    from fp8scope.autolog.attach import attach_run

    def train(with_windows: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        training, run = Training(), begin(settings)
        # The budget goes by the time of a step: both runs must read all of their tensors.
        attach_run(run, training.model, training.optimizer, watching={"overhead": None})
        train_step = window(run, training) if with_windows else training.step
        losses = [train_step(batch) for batch in training.batches()]
        state = training.state()
        run.finish()
        rows = server.runs[run.id].rows
        return losses, state, [(row["step"], row["scalars"]["loss"], row["tensors"]["amax"]) for row in rows]

    losses, state, rows = train(False)
    windowed_losses, windowed_state, windowed_rows = train(True)
    assert equal(losses, windowed_losses) and equal(state, windowed_state)
    assert rows == windowed_rows and [row[0] for row in rows] == list(range(1, STEPS + 1))
    reports = list(server.runs.values())[-1].reports_of("reference")
    assert [report["step"] for report in reports] == [9, 17]


@pytest.mark.parametrize("place", ["cpu", "device"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Fp8AdamW", "LBFGS-like"])
def test_bit_for_bit_with_every_optimizer(name: str, place: str, settings: Settings) -> None:
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
        "Fp8AdamW": lambda parameters: Fp8AdamW(parameters, lr=1e-2),
        "LBFGS-like": lambda parameters: torch.optim.Rprop(parameters, lr=1e-2),
    }
    expected = Training(optimizers[name])
    expected_losses = [expected.step(batch) for batch in expected.batches()]
    expected_state = expected.state()
    training, run = Training(optimizers[name]), begin(settings)
    losses = explicit(training, run, window(run, training, keep_on=place))
    assert equal(losses, expected_losses) and equal(training.state(), expected_state)


def test_nothing_of_a_window_is_recorded(server: WireServer, settings: Settings) -> None:
    def record(with_windows: bool) -> list[dict[str, Any]]:
        training, run = Training(), begin(settings)
        # The budget goes by the time of a step: both runs must read all of their tensors.
        run.watch(training.model, training.optimizer, overhead=None)
        explicit(training, run, window(run, training) if with_windows else training.step)
        assert run.finish().complete
        rows = server.runs[run.id].rows
        keep = ("loss", "tokens", "learning_rate", "grad_norm")
        return [
            {"step": row["step"], **{name: row["scalars"].get(name) for name in keep}, **row["tensors"]}
            for row in rows
        ]

    quiet, loud = record(False), record(True)
    assert [row["step"] for row in loud] == list(range(1, STEPS + 1))
    assert repr(quiet) == repr(loud)


def test_dropout_is_the_same_in_both_arms(settings: Settings, server: WireServer) -> None:
    """What depends on random numbers alone is equal in both, step by step."""
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(torch.ones(1000), 0.5).sum()
        return dropped + random.random() + float(np.random.rand())

    train_step = run.reference_window(step, training.model, training.optimizer, every=EVERY, steps=WINDOW)
    for batch in training.batches():
        with run.step():
            train_step(batch)
    run.finish()
    for report in server.run.reports_of("reference"):
        assert report["bf16"] == report["fp8"] and len(set(report["fp8"])) == WINDOW
        assert report["delta"] == 0.0 and report["verdict"] == "within"


def test_a_policy_falls_back_until_the_next_window(server: WireServer, settings: Settings) -> None:
    training, run = Training(), begin(settings)
    run.watch(training.model)

    def harmed(batch: torch.Tensor) -> torch.Tensor:
        harm = sum(layer.precision == "fp8" for _, layer in fp8_layers(training.model))
        return Training.step(training, batch) + 0.1 * harm

    training.step = harmed  # type: ignore[method-assign]
    train_step = window(run, training, policy="fallback")
    precisions = []
    for batch in training.batches(22):
        with run.step() as step:
            step.log(loss=train_step(batch))
        precisions.append({layer.precision for _, layer in fp8_layers(training.model)})
    run.finish()
    first, second = server.run.reports_of("reference")
    assert first["verdict"] == second["verdict"] == "over" and first["action"] == "fallback"
    # FP8 to the first window's end (after step 12); then BF16 until the second begins (with step 17).
    expected = [{"fp8"}] * 11 + [{"bf16"}] * 5 + [{"fp8"}] * 3 + [{"bf16"}] * 3
    assert precisions == expected
    texts = [one["text"] for one in server.run.reports_of("annotation")]
    assert [text[:16] for text in texts] == ["2 layers to BF16", "2 layers to FP8:", "2 layers to BF16"]


def test_the_projects_margin_is_the_tolerance(server: WireServer, settings: Settings) -> None:
    original = WireServer._register

    def register(self: WireServer, *arguments: Any) -> Any:
        status, answer = original(self, *arguments)
        return status, {**answer, "margin": 0.5}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WireServer, "_register", register)
        training, run = Training(), begin(settings)
        wait_until(lambda: run.margin is not None, "the project's margin")
        explicit(training, run, window(run, training))
        run.finish()
    assert {one["tolerance"] for one in server.run.reports_of("reference")} == {0.5}
    assert {one["verdict"] for one in server.run.reports_of("reference")} == {"within"}


def test_a_run_that_records_nothing_changes_nothing(settings: Settings) -> None:
    run, training = fp8scope.init(mode="disabled"), Training()
    step = training.step
    assert run.reference_window(step, training.model, training.optimizer, every=8, steps=4) is step
    live = begin(settings)
    train_step = live.reference_window(step, training.model, training.optimizer, every=2, steps=2)
    live.finish()
    assert isinstance(train_step, ReferenceWindow)
    for batch in training.batches(6):
        train_step(batch)


def test_without_fp8_there_is_nothing_to_compare(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    run, model = begin(settings), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step = run.reference_window(lambda x: model(x).sum(), model, optimizer, every=2, steps=2)
    for _ in range(8):
        train_step(torch.zeros(1, 4))
    assert caplog.text.count("no layer in FP8") == 1
