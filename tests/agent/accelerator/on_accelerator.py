"""An accelerator against a CPU, on the emulated one. test_accelerator.py runs this file."""

import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agent.helpers.emulated_accelerator import NAME, Event, Module
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn

from fp8scope.autolog.attach import attach_run
from fp8scope.capture.active import capture_into, current
from fp8scope.cli.doctor import check_torch
from fp8scope.config import Settings
from fp8scope.control.training_state import RandomState
from fp8scope.incidents.snapshots import Trained, random_state, restore_random
from fp8scope.observe.facts import TrainingFacts
from fp8scope.observe.timing.anatomy import COMMUNICATION, PARTS, scalar_of
from fp8scope.observe.timing.clock import BACKWARD, FORWARD, LAUNCH_BOUND, PHASES, DeviceClock
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8AdamW,
    Fp8GradientReducer,
    Recipe,
    RowwiseScaling,
    convert,
    devices,
    set_backend,
)

DEVICE = torch.device(NAME, 0)
MEASURED = (*PHASES, *map(scalar_of, PARTS), "step_seconds", "time_agent", "memory_rss", "memory_anonymous")


def model_on(device: str, recipe: Recipe | None = None) -> nn.Sequential:
    """The same weights on every device: they are drawn on the host."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    if recipe is not None:
        convert(model, recipe)
    return model.to(device)


def batch_on(device: str, number: int) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator("cpu").manual_seed(number), device="cpu").to(device)


def train(device: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    losses = []
    for number in range(steps):
        loss = model(batch_on(device, number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def record(device: str, settings: Settings, recipe: Recipe | None, **how: Any) -> None:
    model = model_on(device, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run = Run(settings, blank_registration(device))
    # Without a budget of time, which leaves out readings by the clock.
    run.watch(model, optimizer, every=2, overhead=None, **how)
    for number in range(4):
        with run.step(tokens=16) as step:
            (loss,) = train(device, model, optimizer, 1)
            step.log(loss=loss, double=loss * 2, tensor=torch.tensor(number, device=device))
    report = run.finish()
    assert report.complete and report.errors == 0 and report.rows_dropped == 0


def statistics_of(row: dict[str, Any]) -> dict[tuple[str, int], float]:
    """The statistics of a step by name and tensor, without NaN.

    The rows of a batch are as wide as the widest of them, and how steps share batches is a matter of time.
    """
    return {
        (name, tensor): float(value)
        for name, values in row["tensors"].items()
        for tensor, value in enumerate(values)
        if value is not None and not math.isnan(value)
    }


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        (DelayedScaling(), {}),
        (RowwiseScaling(), {}),
        (None, {"readiness": True}),
        (None, {"shadow": CurrentScaling()}),
    ],
    ids=["delayed", "rows", "readiness", "shadow"],
)
def test_records_what_a_cpu_records(
    recipe: Recipe | None, how: dict[str, Any], server: WireServer, settings: Settings
) -> None:
    """Losses, gradient norms and the statistics of every tensor are those of the same training on a CPU."""
    for device in ("cpu", NAME):
        # The definition is what both devices can compute.
        set_backend("reference")
        record(device, settings, recipe, **how)
        set_backend("auto")
    host, there = server.runs.values()
    assert [row["step"] for row in there.rows] == [row["step"] for row in host.rows] == [1, 2, 3, 4]
    for row, expected in zip(there.rows, host.rows, strict=True):
        for name, value in expected["scalars"].items():
            if name not in MEASURED and "seconds" not in name and "per_second" not in name:
                assert row["scalars"][name] == pytest.approx(value, rel=1e-6), name
        statistics = statistics_of(expected)
        assert len(statistics) >= 6 * 3 and statistics_of(row) == pytest.approx(statistics, rel=1e-5)
    assert all((row["scalars"].get("time_forward") or 0) > 0 for row in there.rows[1:])


def test_times_are_those_between_events() -> None:
    clock = DeviceClock(DEVICE)
    clock.begin()
    clock.mark(1)
    times = clock.end()
    assert times is not None and not times.is_ready()
    times.wait()
    assert times.is_ready() and all(seconds >= 0 for seconds in times.read().values())


def test_the_anatomy_is_that_between_events() -> None:
    clock = DeviceClock(DEVICE)
    clock.begin()
    clock.enter()
    time.sleep(0.01)
    clock.leave(COMMUNICATION)
    clock.mark(1)
    times = clock.end()
    assert times is not None
    times.wait()
    phases, parts = times.read(), times.anatomy()
    assert parts["anatomy/communication_seconds"] >= 0.01 and "anatomy/copy_seconds" not in parts
    assert sum(parts.values()) == pytest.approx(sum(phases.values()))
    assert parts["anatomy/communication_seconds"] <= phases["time_forward"]


def test_a_device_that_has_nothing_to_do_is_launch_bound() -> None:
    clock = DeviceClock(DEVICE)
    clock.begin()
    clock.mark(FORWARD)
    # The device has finished meanwhile, and the host goes on launching.
    time.sleep(0.02)
    clock.mark(BACKWARD)
    times = clock.end()
    assert times is not None
    times.wait()
    phases, bound = times.read(), times.anatomy()[LAUNCH_BOUND]
    assert bound == pytest.approx(phases["time_backward"]) and bound >= 0.02


def test_copies_of_batches_are_a_part(server: WireServer, settings: Settings) -> None:
    record(NAME, settings, None)
    copies = server.run.scalars("anatomy/copy_seconds")
    assert all(copy is not None and copy > 0 for copy in copies)
    # The last run to end has restored the function.
    assert torch.Tensor.to is torch._C.TensorBase.to


def test_an_unchanged_tensor_that_is_copied_again_is_counted() -> None:
    facts = TrainingFacts()
    with torch.device("cpu"):
        mask, buffer = torch.ones(4), torch.ones(4)
    for number in range(5):
        # A new batch often lies where the last one lay; a buffer has other values each time.
        for source in (mask, batch_on("cpu", number), buffer.fill_(number)):
            facts.note_copy(source, source.to(DEVICE))
    copies = facts.document(DEVICE)["copies"]
    assert copies["repeated"] == [{"times": 5, "bytes": 16, "shape": [4]}]
    assert copies["bytes"] == 5 * (16 + 16 * 32 * 4 + 16)
    assert facts.document(DEVICE)["memory"]["allocated_peak"] == 15


def test_copies_to_the_host_run_beside_it() -> None:
    assert devices.can_pin(DEVICE)
    moved = devices.to_device(torch.ones(3, device="cpu"), DEVICE)
    assert moved.device == DEVICE and moved.sum().item() == 3
    event = devices.new_event(DEVICE, timing=False)
    assert isinstance(event, Event)
    devices.record(event, DEVICE)
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_memory_and_names_are_those_of_the_device() -> None:
    assert devices.memory_stats(DEVICE)["allocated_bytes.all.peak"] == 15
    assert devices.accelerators() == [DEVICE] and devices.is_initialized()
    assert devices.name_of(DEVICE) == "Emulated Accelerator"
    (finding,) = [result for result in check_torch() if result.check == "gpu"]
    assert finding.state == "warn" and "Emulated Accelerator" in finding.message


@pytest.mark.parametrize("keep", ["snapshot", "window"])
def test_the_devices_random_state_is_restored(keep: str) -> None:
    models = [model_on(NAME)]
    Module.random_state.fill_(7)
    restore: Callable[[], None]
    if keep == "snapshot":
        state = random_state(models)
        assert list(state["devices"]) == [str(DEVICE)]

        def restore() -> None:
            restore_random(state)
    else:
        restore = RandomState(models).restore
    expected = torch.rand(3, device="cpu"), random.random()
    Module.random_state.fill_(9)
    restore()
    assert Module.random_state.tolist() == [7] * 4
    assert torch.equal(torch.rand(3, device="cpu"), expected[0]) and random.random() == expected[1]


def test_a_training_goes_on_from_a_snapshot() -> None:
    trained = []
    for seed in (1, 2):
        model = model_on(NAME, DelayedScaling())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        train(NAME, model, optimizer, seed)
        trained.append((model, optimizer, Trained([model], [optimizer], [])))
    (model, optimizer, state), (other_model, other_optimizer, other_state) = trained
    snapshot = state.capture()
    expected = train(NAME, model, optimizer, 3)
    other_state.load(snapshot)
    losses = train(NAME, other_model, other_optimizer, 3)
    assert torch.equal(torch.stack(losses), torch.stack(expected))


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(), CurrentScaling(stochastic_gradients=False), RowwiseScaling(), BlockScaling(), MXFP8()],
    ids=lambda recipe: recipe.kind,
)
def test_layers_train_as_on_a_cpu(recipe: Recipe) -> None:
    losses = []
    for device in ("cpu", NAME):
        model = model_on(device, recipe)
        optimizer = Fp8AdamW(model.parameters(), lr=1e-2)
        losses.append(torch.stack(train(device, model, optimizer, 3)).cpu())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)


def test_gradients_are_reduced_in_fp8() -> None:
    grads = []
    for device in ("cpu", NAME):
        model = model_on(device)
        model(batch_on(device, 1)).square().mean().backward()
        Fp8GradientReducer(model.named_parameters()).reduce()
        grads.append([parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None])
    assert len(grads[0]) == 4
    for there, expected in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(there, expected, rtol=1e-4, atol=1e-8)


def test_captured_values_of_a_device(server: WireServer, settings: Settings) -> None:
    """Also those that share a step, which have rows of their own. Two trackers get one tensor."""
    model = model_on(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    run = Run(settings, blank_registration("captured"))
    attach_run(run, model, optimizer)
    capture_into(run, ["wandb"])
    capture = current()
    assert capture is not None
    capture.take("wandb", {"early": torch.tensor(0.5, device=DEVICE)}, 0)
    for number in range(3):
        (loss,) = train(NAME, model, optimizer, 1)
        for part in range(2):
            value = torch.tensor(float(10 * number + part), device=DEVICE)
            capture.take("wandb", {"x": value, "loss": loss}, 2 * number + part)
            capture.take("tensorboard", {"x": value}, number)
    report = run.finish()
    assert report.complete and report.errors == 0
    values = [(row["step"], row["scalars"].get("x")) for row in server.run.rows]
    assert [pair for pair in values if pair[1] is not None] == [
        (number + 1, 10.0 * number + part) for number in range(3) for part in range(2)
    ]
    assert [value for value in server.run.scalars("early") if value is not None] == [0.5]
    assert len([value for value in server.run.scalars("loss") if value is not None]) == 3
