"""Light steps, of which only the loss is taken: what is recorded of them, and that they do little."""

import copy
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn

import fp8scope
from fp8scope.observe.budget import TimeBudget
from fp8scope.run import Run
from fp8scope_kernels import Recipe

pytestmark = pytest.mark.usefixtures("online")

EVERY = 10


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps count as short from the first one on, whatever the speed of this machine."""
    make = TimeBudget.__init__

    def short(self: TimeBudget, *arguments: Any) -> None:
        make(self, *arguments)
        self.every = self._measured_every = EVERY
        self.lag = 5

    monkeypatch.setattr(TimeBudget, "__init__", short)
    monkeypatch.setattr(TimeBudget, "_review", lambda self: None)


class Training:
    """A small model and its optimizer; `step` trains once and returns the loss."""

    def __init__(self, recipe: Recipe | None = None, **arguments: Any) -> None:
        torch.manual_seed(0)
        # FP8 takes multiples of 16.
        width, out = (8, 1) if recipe is None else (16, 16)
        self.model = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out))
        if recipe is not None:
            fp8scope.convert(self.model, recipe, exclude=())
        self.width = width
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.run: Run = fp8scope.attach(self.model, self.optimizer, name="light", **arguments)
        self.losses: list[float] = []

    @property
    def is_light(self) -> bool:
        return self.run.session.steps.light is not None and self.run.session.steps.light.is_on

    def loss(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(4, self.width)).square().mean()
        return loss

    def step(self, passes: int = 1) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(passes):
            loss = self.loss() / passes
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.optimizer.step()
        self.losses.append(total)
        return total

    def until_light(self) -> None:
        while not self.is_light or len(self.losses) % EVERY != 4:
            self.step()


def our_calls(action: Callable[[], object]) -> list[str]:
    """The functions of the agent that `action` calls on this thread."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/fp8scope" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def hooks_of(training: Training) -> list[object]:
    tables = [
        table
        for module in training.model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
    ]
    return [hook for table in tables for hook in table.values()]


def test_it_works(server: WireServer) -> None:
    """A light step takes few calls, and the model has no hook meanwhile; each loss is recorded."""
    training = Training()
    training.until_light()
    assert hooks_of(training) == []
    assert len(training.optimizer._optimizer_step_pre_hooks) == 0
    calls = our_calls(training.step)
    assert training.is_light and 0 < len(calls) <= 16, calls
    while training.is_light:
        training.step()
    assert len(hooks_of(training)) > 0
    for _ in range(25):
        training.step()
    assert training.run.finish().errors == 0
    stored = server.run
    assert stored.steps == list(range(1, len(training.losses) + 1))
    assert stored.scalars("loss") == pytest.approx(training.losses, rel=1e-6)
    norms = [step for step, value in zip(stored.steps, stored.scalars("grad_norm"), strict=True) if value]
    assert norms == list(range(1, len(training.losses) + 1, EVERY))
    assert stored.scalars("measured_every")[EVERY] == EVERY
    assert hooks_of(training) == [] and not training.optimizer._optimizer_step_post_hooks


def test_the_random_state_and_the_losses_are_the_same() -> None:
    torch.manual_seed(0)
    watched = Training(mode="offline")
    for _ in range(60):
        watched.step()
    watched.run.finish()
    alone = Training(mode="disabled")
    for _ in range(60):
        alone.step()
    assert watched.losses == alone.losses
    assert torch.equal(watched.model[0].weight, alone.model[0].weight)  # type: ignore[arg-type]


def test_values_belong_to_the_step_after_which_they_are_logged(server: WireServer) -> None:
    training = Training()
    for number in range(1, 46):
        loss = training.loss()
        training.run.log(before=number)
        training.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        training.run.log(between=number)
        training.optimizer.step()
        training.run.log(after=number)
    training.run.finish()
    stored = server.run
    assert stored.steps == list(range(1, 46))
    for name in ("before", "between", "after"):
        assert stored.scalars(name) == stored.steps, name
    assert all(value is not None for value in stored.scalars("loss"))


def test_the_first_value_is_logged_in_a_light_step(server: WireServer) -> None:
    training = Training()
    for number in range(1, 31):
        training.step()
        if number % 5 == 0:
            training.run.log(after=number)
    training.run.finish()
    stored = server.run
    logged = {step: value for step, value in zip(stored.steps, stored.scalars("after"), strict=True) if value}
    assert logged == {number: number for number in range(5, 31, 5)}


def test_nan_is_recorded_in_its_step(server: WireServer) -> None:
    training = Training()
    training.until_light()
    with torch.no_grad():
        training.model[0].weight.fill_(math.nan)  # type: ignore[operator]
    training.step()
    assert training.is_light
    training.run.finish()
    values = server.run.scalars("loss")
    assert [index for index, value in enumerate(values) if value is not None and math.isnan(value)] == [
        len(training.losses) - 1
    ]


def test_losses_of_other_models_and_discarded_ones_do_not_count(server: WireServer) -> None:
    training, other = Training(), nn.Linear(3, 1)
    for _ in range(30):
        other(torch.ones(2, 3)).sum().mul(1000).backward()
        training.loss().mul(1000).backward()  # type: ignore[no-untyped-call]
        training.step()
    training.run.finish()
    assert server.run.scalars("loss") == pytest.approx(training.losses, rel=1e-6)


def test_accumulation_that_begins_in_a_light_step_is_combined(server: WireServer) -> None:
    training = Training()
    training.until_light()
    for passes in (1, 4, 4, 1, *[2] * 20):
        training.step(passes)
    training.run.finish()
    # As in other steps, a loss that is divided but has no companion counts as it is.
    assert server.run.scalars("loss") == pytest.approx(training.losses, rel=1e-5)


def test_a_step_without_a_visible_loss_is_recorded(server: WireServer) -> None:
    training = Training()
    training.until_light()
    parameters = list(training.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(training.loss(), parameters), strict=True):
        parameter.grad = gradient
    training.optimizer.step()
    count = len(training.losses) + 1
    for _ in range(12):
        training.step()
    training.run.finish()
    assert server.run.steps == list(range(1, count + 13))
    losses = server.run.scalars("loss")
    assert losses[count - 1] is None
    assert losses[: count - 1] + losses[count:] == pytest.approx(training.losses, rel=1e-6)


def test_skipped_steps_of_a_scaler_are_counted(server: WireServer) -> None:
    training, scaler = Training(), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for number in range(1, 31):
        training.optimizer.zero_grad()
        loss = training.loss() * (math.inf if number in (14, 15) else 1.0)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(training.optimizer)
        scaler.update()
        training.losses.append(loss.item())
    training.run.finish()
    stored = server.run
    expected = [loss for loss in training.losses if math.isfinite(loss)]
    assert stored.scalars("loss") == pytest.approx(expected, rel=1e-6)
    assert stored.scalars("skipped_steps")[13] == 2.0


def test_tokens_go_on(server: WireServer) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = fp8scope.attach(model, optimizer, name="tokens")
    for _ in range(35):
        model(torch.randint(0, 10, (2, 3))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
    assert server.run.scalars("tokens") == [6.0 * number for number in range(1, 36)]


def test_hooks_of_the_script_stay_in_order(server: WireServer) -> None:
    training, seen = Training(), []
    training.model.register_forward_hook(lambda *_: seen.append("first"))
    training.optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    training.until_light()
    handle = training.model.register_forward_hook(lambda *_: seen.append("second"))
    seen.clear()
    steps = 2 * EVERY
    for _ in range(steps):
        training.step()
    assert seen == ["first", "second", "stepped"] * steps
    handle.remove()
    training.step()
    assert seen[-2:] == ["first", "stepped"]
    clone = copy.deepcopy(training.model)
    clone(torch.ones(1, 8))
    assert training.run.finish().errors == 0
    assert len(training.model._forward_hooks) == 1 and len(training.optimizer._optimizer_step_post_hooks) == 1


def test_a_run_may_end_between_light_steps(server: WireServer) -> None:
    training = Training()
    training.until_light()
    training.run.detach()
    assert not training.is_light and len(training.optimizer._optimizer_step_pre_hooks) > 0
    count = len(training.losses)
    training.step()
    with training.run.step() as step:
        step.log(loss=1.0)
    training.run.finish()
    assert server.run.steps == list(range(1, count + 2))


@pytest.mark.parametrize(
    "arguments", [{"every": 4}, {"shadow": fp8scope.DelayedScaling()}], ids=["sampled", "shadow"]
)
def test_some_steps_are_not_light(server: WireServer, arguments: dict[str, Any]) -> None:
    """Sampled ones that come often, and those on which a delayed scale of shadow mode depends."""
    training = Training(**arguments)
    for _ in range(30):
        training.step()
    assert not training.is_light
    training.run.finish()
    assert server.run.scalars("loss") == pytest.approx(training.losses, rel=1e-6)


@pytest.mark.parametrize(
    "recipe", [fp8scope.DelayedScaling(), fp8scope.CurrentScaling()], ids=["delayed", "current"]
)
def test_counters_of_fp8_layers_add_up(server: WireServer, recipe: Recipe) -> None:
    """A complete step has what was counted since the last one, and no cast is counted twice or left out."""
    training = Training(recipe)
    training.until_light()
    calls = our_calls(training.step)
    assert training.is_light and not {"snapshot", "begin_step", "measure_step"} & set(calls)
    for _ in range(3 * EVERY):
        training.step()
    assert training.run.finish().errors == 0
    stored = server.run
    assert stored.steps == list(range(1, len(training.losses) + 1))
    assert stored.scalars("loss") == pytest.approx(training.losses, rel=1e-6)
    names = [tensor["name"] for tensor in next(iter(stored.catalogues.values()))]
    inputs = names.index("0.input")
    counted = {
        step: row["tensors"]["numel"][inputs]
        for step, row in zip(stored.steps, stored.rows, strict=True)
        if row["tensors"].get("numel")
    }
    counted = {step: numel for step, numel in counted.items() if numel}
    last = 0
    for step, numel in counted.items():
        assert numel == 4 * training.width * (step - last), counted
        last = step
    complete = [step for step in counted if step % EVERY == 1]
    assert complete == list(range(1, len(training.losses), EVERY))
