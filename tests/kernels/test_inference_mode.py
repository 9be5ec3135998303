"""Evaluating in `torch.inference_mode` leaves no inference tensors that training could not write to."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope_kernels import (
    E3M2,
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp6Linear,
    Fp8AdamW,
    Fp8GradientReducer,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    ScalingState,
    StatisticsBuffer,
    convert,
    observe,
    set_backend,
)
from fp8scope_kernels.backends import Backend

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "at random": CurrentScaling(stochastic_gradients=True),
    "unsaturated": DelayedScaling(saturate=False, margin=1),
    "rows": RowwiseScaling(),
    "blocks": BlockScaling(),
    "MX": MXFP8(),
    "NVFP4": NVFP4(),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
on_each_backend = pytest.mark.parametrize("backend", ["reference", "compiled"])


pytestmark = pytest.mark.usefixtures("automatic_backend")


def in_new_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread that has no workspace yet."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def batch(rows: int, width: int = 64) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


@on_each_backend
@recipes
def test_it_works(recipe: Recipe, backend: Backend) -> None:
    """A large evaluation, then a small training step: as if there had been no evaluation."""

    def train(evaluating: bool) -> list[Tensor]:
        set_backend(backend)
        torch.manual_seed(0)
        layer = Fp8Linear(64, 64, recipe=recipe)
        if evaluating:
            layer.eval()
            with torch.inference_mode():
                assert layer(batch(256)).is_inference()
            layer.train()
        x = batch(8).requires_grad_()
        output = layer(x)
        output.square().sum().backward()
        assert x.grad is not None and layer.weight.grad is not None
        return [output.detach(), x.grad, layer.weight.grad, *layer.buffers()]

    for one, other in zip(
        in_new_thread(lambda: train(True)), in_new_thread(lambda: train(False)), strict=True
    ):
        assert torch.equal(one, other)


@recipes
def test_state_that_advances_in_it(recipe: Recipe) -> None:
    """A model left in training mode counts there as elsewhere."""
    seen = []
    for mode in (True, False):
        torch.manual_seed(0)
        model, buffer = nn.Sequential(nn.Linear(64, 64)), StatisticsBuffer()
        convert(model, recipe)
        observe(model, buffer)
        with torch.inference_mode(mode):
            model(batch(16))
        model(batch(8)).sum().backward()
        seen.append([buffer.data.clone(), *(b.clone() for b in model.buffers())])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@recipes
def test_a_model_converted_and_observed_in_it_trains(recipe: Recipe) -> None:
    """The buffer is made, grows, and takes samples there."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.inference_mode():
        convert(model, recipe)
        buffer = StatisticsBuffer(1)
        observe(model, buffer)
        buffer.sampling = True
        model(batch(16))
        buffer.recycle(buffer.exchange())
        buffer.exchange()
    model(batch(8)).sum().backward()
    assert buffer.sample_data is not None and buffer.sample_data.any()
    buffer.zero_()
    assert not any(b.is_inference() for b in model.buffers())


def test_state_that_is_moved_in_it() -> None:
    state = ScalingState(DelayedScaling(), E3M2)
    with torch.inference_mode():
        state.to(torch.bfloat16)
        state.to("meta")
    assert not any(b.is_inference() for b in state.buffers())
    assert state.scale.dtype == torch.float32


def test_tables_of_formats_serve_training_afterwards() -> None:
    with torch.inference_mode():
        table = dataclasses.replace(E3M2, name="mine").table
        layer = Fp6Linear.from_linear(nn.Linear(32, 16))
        layer(batch(4, 32))
    assert not table.is_inference()
    with torch.inference_mode(False):
        weight = nn.Parameter(torch.ones(64))
    torch.autograd.backward((table * weight).sum())
    assert weight.grad is not None


def test_reduced_gradients_and_optimizer_states() -> None:
    parameter = nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    with torch.inference_mode():
        reducer = Fp8GradientReducer([("weight", parameter)])
        reducer.reduce()
        state = reducer.state_dict()
        optimizers = [Fp8AdamW([parameter], level=level) for level in ("O1", "O2")]
        for optimizer in optimizers:
            optimizer.step()
    reducer.reduce()
    reducer.load_state_dict(state)
    for optimizer in optimizers:
        optimizer.step()
    assert parameter.isfinite().all() and bool((parameter < 1).all())
