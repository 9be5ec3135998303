"""Hooks are registered in the steps that need them, and torch.compile sees them nevertheless."""

from typing import Any

import pytest
import torch
from agent.helpers.watching import NUMEL, Watched
from torch import nn

from fp8scope.control.suspended_hooks import without_hooks
from fp8scope.observe.budget import COMPLETE_STEPS, TimeBudget
from fp8scope.observe.tensors.activations import InputHook
from fp8scope.observe.tensors.switched_hooks import HookSwitch
from fp8scope_kernels import CurrentScaling, DelayedScaling, HighPrecisionObserver, convert
from fp8scope_kernels.torch_internals import call_before_compiling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def model_of(recipe: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if recipe == "fp8":
        convert(model, DelayedScaling())
    return model


def watched_every(model: nn.Module, pace: int, every: int, **how: Any) -> Watched:
    """Watch with plain tensors read every `pace` steps from the start, and every `every` steps sampled."""
    watched = Watched(model, every=every, **how)
    budget = watched.collector._budget = TimeBudget(0.02)
    budget.every, budget._steps = pace, COMPLETE_STEPS
    return watched


def hooks(model: nn.Module) -> tuple[int, int]:
    """The registered hooks that read plain tensors, and those that only sampled steps need."""
    every = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return sum(isinstance(h, HighPrecisionObserver) for h in every), sum(
        isinstance(h, InputHook) for h in every
    )


@pytest.fixture(autouse=True)
def compiler() -> None:
    # torch.optim loads it in the first step of a training.
    import torch._dynamo

    torch._dynamo.reset()


@pytest.mark.parametrize("how", [{}, {"shadow": CurrentScaling()}, {"readiness": True}])
def test_it_works(how: dict[str, Any]) -> None:
    model = model_of()
    watched = watched_every(model, 2, 4, **how)
    x, seen = torch.randn(4, 16), []

    def work() -> None:
        seen.append(hooks(model))
        model(x).square().mean().backward()

    steps = [watched.step(work) for _ in range(8)]
    assert seen == [(4, 4), (0, 0), (4, 0), (0, 0)] * 2
    assert [step.row("0.up.input")[NUMEL] for step in steps] == [64, 0] * 4
    assert [step.extra("kurtosis", "1.down.input") > 0 for step in steps] == [True, False, False, False] * 2


def test_delayed_shadow_scales_need_every_step() -> None:
    model = model_of()
    watched = watched_every(model, 2, 4, shadow=DelayedScaling())
    seen: list[Any] = []
    for _ in range(4):
        watched.step(lambda: seen.append(hooks(model)))
    assert seen == [(4, 4), (4, 0), (4, 0), (4, 0)]


def test_hooks_end_with_the_run() -> None:
    model = model_of()
    watched = watched_every(model, 2, 4)
    for ends_after in (1, 2):
        watched.step(lambda: None)
        if ends_after == 2:
            watched.collector.close()
    assert hooks(model) == (0, 0)
    watched.step(lambda: None)
    assert hooks(model) == (0, 0)


def test_an_earlier_run_does_not_bring_its_hooks_back() -> None:
    model = model_of()
    first, second = watched_every(model, 2, 4), watched_every(model, 2, 4)
    second.step(lambda: None)
    second.step(lambda: None)
    assert hooks(model) == (0, 0)
    first.step(lambda: None)
    assert hooks(model) == (0, 0)
    second.step(lambda: None)
    assert hooks(model) == (4, 0)


def test_hooks_of_others_keep_their_order() -> None:
    model = model_of()
    layer, calls = model[0].up, []  # type: ignore[index]
    watched = watched_every(model, 2, 2)
    layer.register_forward_hook(lambda *_: calls.append("theirs"))
    order = list(layer._forward_hooks)
    for _ in range(3):
        watched.step(lambda: model(torch.randn(4, 16)))
        assert list(layer._forward_hooks) == order
    assert calls == ["theirs"] * 3


def test_a_suspended_model_stays_without_hooks() -> None:
    model = model_of()
    watched = watched_every(model, 2, 2)
    watched.step(lambda: None)
    watched.step(lambda: None)
    with without_hooks([model]):
        watched.step(lambda: None)
        torch.compile(model, backend="eager")(torch.randn(4, 16))
        assert hooks(model) == (0, 0)


@pytest.mark.parametrize("recipe", ["plain", "fp8"])
def test_nothing_is_compiled_again(recipe: str) -> None:
    graphs = []
    for pace in (1, 2):
        torch._dynamo.reset()
        model = model_of(recipe)
        count = 0

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            nonlocal count
            count += 1
            return graph.forward

        compiled: Any = torch.compile(model, backend=backend)
        watched = watched_every(compiled, pace, 4)
        x = torch.randn(4, 16)
        steps = [watched.step(lambda: compiled(x).square().mean().backward()) for _ in range(9)]  # noqa: B023
        graphs.append(count)
        read = [step.row("0.up.input")[NUMEL] > 0 for step in steps]
        assert read == [recipe == "fp8" or number % pace == 0 for number in range(9)]
    assert graphs[0] == graphs[1] > 0


@pytest.mark.parametrize("change", ["shape", "late"])
def test_what_is_compiled_without_hooks_calls_them_later(change: str) -> None:
    """A graph that is compiled in a step without readings: for a new shape, or for the first time."""
    model = model_of()
    compiled: Any = torch.compile(model, backend="eager")
    watched = watched_every(compiled, 3, 0)
    for number in range(1, 8):
        x = torch.randn(4 if number < 3 else 5, 16)
        call = model if change == "late" and number < 3 else compiled
        step = watched.step(lambda: call(x).square().mean().backward())  # noqa: B023
        assert step.row("0.up.input")[NUMEL] == (x.numel() if number % 3 == 1 else 0)


def test_hooks_stay_if_compilations_are_not_announced() -> None:
    model = model_of()
    watched = watched_every(model, 2, 4)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        for _ in range(3):
            watched.step(lambda: None)
            assert hooks(model) == (4, 4)


def test_one_call_is_arranged_once() -> None:
    calls: list[object] = []
    assert call_before_compiling(calls.append) and call_before_compiling(calls.append)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert len(calls) == 1


def test_an_error_does_not_end_the_compilation() -> None:
    switch, layer = HookSwitch(), nn.Linear(2, 2)
    errors: list[Exception] = []
    switch.add(layer, "_forward_hooks", lambda *_: None, errors.append)
    switch.set(False)
    assert not layer._forward_hooks
    del layer._forward_hooks
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert len(errors) == 1 and isinstance(errors[0], AttributeError)
