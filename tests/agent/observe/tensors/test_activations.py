"""The kurtosis of layers' inputs in sampled steps."""

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.watching import Watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8scope.observe.tensors.activations import KURTOSIS_ELEMENTS, InputHook, kurtosis
from fp8scope_kernels import CurrentScaling, convert


def model_of(recipe: str = "plain") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32))
    if recipe == "fp8":
        convert(model, CurrentScaling())
    return model


def train(model: nn.Module, x: Tensor) -> None:
    model(x).float().square().mean().backward()


def defined(x: Tensor) -> float:
    """The definition, in NumPy."""
    values = x.detach().double().numpy().ravel()
    centred = values - values.mean()
    return float((centred**4).mean() / (centred**2).mean() ** 2)


@pytest.mark.parametrize("recipe", ["plain", "fp8", "shadow", "readiness"])
def test_it_works(recipe: str) -> None:
    model = model_of(recipe)
    how: dict[str, Any] = {"shadow": {"shadow": CurrentScaling()}, "readiness": {"readiness": True}}
    how = how.get(recipe, {})
    watched = Watched(model, every=2, **how)
    x = torch.randn(16, 32)
    x[:, 3] *= 20
    steps = [watched.step(partial(train, model, x)) for _ in range(3)]
    assert watched.tensors == len(watched.names) == 6
    for index, step in enumerate(steps):
        if index % 2:
            assert "kurtosis" not in step.observed.extras
            continue
        assert step.extra("kurtosis", "0.input") == pytest.approx(defined(x), rel=1e-9)
        assert np.isfinite(step.extra("kurtosis", "2.input"))
        assert np.isnan(step.extra("kurtosis", "0.weight"))


def test_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, 50, generator=generator)
    assert kurtosis(normal) == pytest.approx(3.0, abs=0.1)
    assert kurtosis(torch.rand(2000, 50, generator=generator)) == pytest.approx(1.8, abs=0.05)
    # A mean far above the spread, where sums of powers would cancel.
    assert kurtosis(1e4 + normal.double()) == pytest.approx(defined(normal), rel=1e-6)
    assert kurtosis(normal * 1e-20) == pytest.approx(defined(normal), rel=1e-5)
    for undefined in (torch.ones(4, 4), torch.zeros(0, 4), torch.tensor([[1.0, torch.inf]])):
        assert torch.isnan(kurtosis(undefined))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_do_not_overflow(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 32) * 1000).to(dtype)
    x[0, 0] = 60_000
    assert kurtosis(x) == pytest.approx(defined(x.float()), rel=1e-9)


def test_a_large_input_is_represented_by_whole_rows() -> None:
    # One feature in 512 is an outlier. Evenly spaced elements could miss it, or hit nothing else.
    x = torch.randn(64, 64, 512, generator=torch.Generator().manual_seed(0))
    x[..., 7] *= 30
    assert x.numel() > 4 * KURTOSIS_ELEMENTS
    assert kurtosis(x) == pytest.approx(defined(x), rel=0.4)
    # Only the first position of each sequence differs.
    x = torch.ones(64, 64, 512)
    x[:, 0] = 3.0
    assert kurtosis(x) == pytest.approx(defined(x), rel=0.3)


def test_of_several_calls_the_largest_counts() -> None:
    model = model_of()
    watched = Watched(model)
    calm, loud = torch.randn(16, 32), torch.randn(16, 32)
    loud[0, 0] = 100.0

    def accumulate() -> None:
        for x in (calm, loud, calm):
            train(model, x)

    step = watched.step(accumulate)
    assert step.extra("kurtosis", "0.input") == pytest.approx(defined(loud), rel=1e-9)
    # Of the next step alone.
    step = watched.step(partial(train, model, calm))
    assert step.extra("kurtosis", "0.input") == pytest.approx(defined(calm), rel=1e-9)


def test_an_input_that_is_not_finite_is_left_out() -> None:
    model = model_of()
    watched = Watched(model)
    x = torch.randn(16, 32)
    x[0, 0] = torch.nan
    step = watched.step(partial(train, model, x))
    assert np.isnan(step.extra("kurtosis", "0.input"))


def test_evaluations_and_recomputed_activations_do_not_count() -> None:
    model = model_of()
    watched = Watched(model)
    calm, loud = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
    loud[0, 0] = 100.0

    def work() -> None:
        model.eval()
        model(loud)
        model.train()
        checkpoint(model, calm, use_reentrant=False).square().mean().backward()

    assert watched.step(work).extra("kurtosis", "0.input") == pytest.approx(defined(calm), rel=1e-9)


def test_fp16_with_a_gradient_scaler() -> None:
    model = model_of().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watched = Watched(model, optimizer, scaler=scaler)
    x = torch.randn(16, 32).half()

    def work() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        optimizer.step()

    assert watched.step(work).extra("kurtosis", "0.input") == pytest.approx(defined(x.float()), rel=1e-9)


def test_inside_of_transforms_nothing_is_read() -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    watched = Watched(model)
    # Only the hook of the kurtosis.
    model[0]._forward_hooks.clear()
    x = torch.randn(5, 32)
    step = watched.step(lambda: torch.func.vmap(model, randomness="error")(x))
    assert np.isnan(step.extra("kurtosis", "0.input"))


def test_the_training_is_the_same() -> None:
    losses = []
    for is_watched in (False, True):
        model = model_of("fp8")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watched = Watched(model, optimizer) if is_watched else None
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            x = torch.randn(16, 32, generator=generator)

            def work(x: Tensor = x) -> None:
                loss = model(x).square().mean()  # noqa: B023
                loss.backward()
                optimizer.step()  # noqa: B023
                losses.append(float(loss.detach()))

            if watched is None:
                work()
            else:
                watched.step(work)
    assert losses[:4] == losses[4:]


def test_hooks_end_with_the_run_and_are_not_copied() -> None:
    model = model_of()
    replaced, watched = Watched(model), Watched(model)
    work = partial(train, model, torch.randn(16, 32))

    def hooks(model: nn.Module) -> list[InputHook]:
        found = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        return [hook for hook in found if isinstance(hook, InputHook)]

    for each in (watched, replaced):
        each.step(work)
        assert len(hooks(model)) == 2
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        watched.step(partial(train, copied, torch.randn(16, 32)))
    again = Watched(model)
    again.step(work)
    again.collector.close()
    assert hooks(model) == []
