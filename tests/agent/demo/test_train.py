"""A training process of the demo."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8scope.demo import arithmetic
from fp8scope.demo.model import Shape
from fp8scope.demo.train import DemoTrainer, Plan, emit, main, parse, run
from fp8scope_kernels import CurrentScaling, fp8_layers

SMALL = Plan(
    name="small",
    steps=24,
    batch=4,
    windows=32,
    warm_up=4,
    shape=Shape(layers=1, width=32, heads=2, context=16),
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def losses(plan: Plan, steps: int | None = None) -> list[float]:
    trainer = DemoTrainer(plan)
    return [float(trainer.train(number)["loss"]) for number in range(1, (steps or plan.steps) + 1)]


def test_it_works() -> None:
    found = losses(replace(SMALL, steps=80, learning_rate=1e-2))
    assert sum(found[-8:]) < sum(found[:8]) - 8 * 0.8


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_run_can_be_repeated_exactly(precision: str) -> None:
    plan = replace(SMALL, precision=precision)
    assert losses(plan) == losses(plan)


def test_fp8_differs_from_its_bf16_twin_by_rounding_only() -> None:
    bf16, fp8 = (torch.tensor(losses(replace(SMALL, precision=p))) for p in ("bf16", "fp8"))
    assert not torch.equal(bf16, fp8)
    torch.testing.assert_close(fp8, bf16, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("has_units", [True, False])
def test_a_recipe_converts_every_layer_on_any_cpu(monkeypatch: pytest.MonkeyPatch, has_units: bool) -> None:
    monkeypatch.setattr(arithmetic, "has_units", lambda: has_units)
    trainer = DemoTrainer(SMALL, CurrentScaling())
    layers = [layer for _, layer in fp8_layers(trainer.model)]
    assert len(layers) >= 4
    assert all(isinstance(layer.state_of("input").recipe, CurrentScaling) for layer in layers)


def test_the_seed_changes_the_model_but_not_the_batches() -> None:
    one, other = DemoTrainer(SMALL), DemoTrainer(replace(SMALL, seed=2))
    assert not torch.equal(one.model.head.weight, other.model.head.weight)
    assert torch.equal(one.corpus.batch(3, 4), other.corpus.batch(3, 4))


def test_the_fault_begins_at_its_step() -> None:
    healthy = replace(SMALL, precision="fp8")
    faulty = replace(healthy, fault_at=10)
    one, other = losses(healthy), losses(faulty)
    # The fault is in the gradients: the loss of its own step is still the healthy one.
    assert one[:10] == other[:10]
    assert one[10:] != other[10:]


def test_the_fault_freezes_only_gradient_scales() -> None:
    trainer = DemoTrainer(replace(SMALL, precision="fp8", fault_at=5))
    for number in range(1, 5):
        trainer.train(number)

    def scales(role: Any) -> list[float]:
        return [float(layer.state_of(role).scale) for _, layer in fp8_layers(trainer.model)]

    before = scales("grad_output")
    for number in range(5, 12):
        trainer.train(number)
    # The scale of step 5 itself had still been due to step 4's magnitudes.
    assert scales("grad_output") == before
    assert trainer.loss_scale == 1024.0


def test_evaluation_does_not_change_the_training() -> None:
    plan = replace(SMALL, precision="fp8")
    trainer = DemoTrainer(plan)
    found = []
    for number in range(1, plan.steps + 1):
        found.append(float(trainer.train(number)["loss"]))
        trainer.evaluate()
    assert found == losses(plan)


def test_evaluation_scores_every_window() -> None:
    correct, nll = DemoTrainer(SMALL).evaluate()
    assert correct.shape == nll.shape == (32,)
    assert set(correct.tolist()) <= {0.0, 1.0}
    assert torch.isfinite(nll).all() and (nll > 0).all()


@pytest.mark.parametrize("steps", [8, 24, 600, 601])
def test_evaluates_as_often_as_planned_and_at_the_end(steps: int) -> None:
    plan = replace(SMALL, steps=steps)
    after = [number for number in range(1, steps + 1) if plan.evaluates_after(number)]
    assert len(after) == plan.evaluations
    assert after[-1] == steps


def test_the_learning_rate_warms_up_and_decays() -> None:
    rates = [SMALL.learning_rate_at(number) for number in range(1, SMALL.steps + 1)]
    assert rates[0] < rates[3] == max(rates)
    assert rates[-1] == pytest.approx(0.1 * SMALL.learning_rate)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_prints_its_progress_as_json_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")
    monkeypatch.setenv("FP8SCOPE_DIR", str(tmp_path))
    # Offline, nothing can arrive, and the exit status says so.
    assert run(replace(SMALL, precision="fp8")) == 1
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [message["event"] for message in events if message["event"] != "progress"] == [
        "started",
        *["evaluated"] * 4,
        "finished",
    ]
    assert events[-2]["event"] == "progress" or events[-2]["step"] == 24
    finished = events[-1]
    assert len(finished["step_times"]) == 24
    assert finished["step_times"] == sorted(finished["step_times"])
    assert finished["final_loss"] > 0


def test_non_finite_values_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    emit("progress", loss=float("nan"), other=float("inf"), step=1)
    assert json.loads(capsys.readouterr().out) == {
        "event": "progress",
        "loss": None,
        "other": None,
        "step": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--name"),
        (["--name", "x", "--steps", "3"], "--steps must be from 8"),
        (["--name", "x", "--fault-at", "5"], "needs --precision fp8"),
        (["--name", "x", "--precision", "fp8", "--fault-at", "601"], "--fault-at must be from 2 to 600"),
        (["--name", "x", "--precision", "fp4"], "invalid choice"),
    ],
)
def test_refuses_invalid_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_parses_a_command_line_to_a_plan() -> None:
    plan = parse(["--name", "x", "--precision", "fp8", "--seed", "3", "--steps", "50", "--fault-at", "20"])
    assert plan == Plan(name="x", precision="fp8", seed=3, steps=50, fault_at=20)
