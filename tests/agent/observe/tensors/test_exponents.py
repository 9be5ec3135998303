"""The exponents of a plain model's tensors: recorded on request, in sampled steps only."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from agent.helpers.watching import AMAX, NUMEL, SCALE, Watched
from torch import Tensor, nn

from fp8scope_kernels import exponent_histogram

ROLES = ("input", "weight", "grad_output")


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, dtype=dtype), nn.GELU(), nn.Linear(64, 32, dtype=dtype))


def train(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    torch.autograd.backward(loss)
    return loss.detach()


def test_it_works() -> None:
    model, x = model_of(), torch.randn(16, 32).bfloat16()
    inputs: list[Tensor] = []
    model[2].register_forward_hook(lambda _, given, __: inputs.append(given[0]))
    watched = Watched(model, every=2, readiness=True)
    first = watched.step(lambda: train(model, x))
    second = watched.step(lambda: train(model, x))
    assert watched.tensors == 6 and {info.format for info in watched.catalogue} == {""}
    assert first.histograms.keys() == {f"{layer}.{role}" for layer in (0, 2) for role in ROLES}
    assert not second.histograms
    weight = model.get_parameter("0.weight").detach()
    for name, tensor in (("0.input", x), ("0.weight", weight), ("2.input", inputs[0].detach())):
        assert first.histograms[name].tolist() == exponent_histogram(tensor).tolist()
        assert first.row(name)[AMAX] == second.row(name)[AMAX] == float(tensor.abs().max())
        assert first.row(name)[NUMEL] == tensor.numel() and first.row(name)[SCALE] == 1
    # Nothing was cast, so there is no error to report.
    assert "sq_error" not in first.observed.extras


def test_calls_of_a_step_add_up() -> None:
    model, x = model_of(), torch.randn(16, 32).bfloat16()
    watched = Watched(model, readiness=True)
    seen = watched.step(lambda: [train(model, x), train(model, x)])
    assert seen.histograms["0.input"].tolist() == (2 * exponent_histogram(x)).tolist()
    assert seen.row("0.input")[NUMEL] == 2 * x.numel()


def test_the_training_stays_the_same() -> None:
    results: list[Tensor] = []
    for watches in (False, True):
        model = model_of(torch.float32)
        watched = Watched(model, readiness=watches)
        torch.manual_seed(1)
        for _ in range(3):
            batch = torch.randn(8, 32)
            watched.step(partial(train, model, batch))
        gradients = [part.grad for part in model.parameters() if part.grad is not None]
        results.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert torch.equal(*results)


def test_without_the_request_no_exponents_are_recorded() -> None:
    model = model_of()
    assert not Watched(model).step(lambda: train(model, torch.randn(4, 32).bfloat16())).histograms


def test_the_factor_of_a_grad_scaler_is_divided_out() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, x = model_of(torch.float32), torch.randn(8, 32)
    gradients: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        gradients.append(gradient)

    def follow(layer: nn.Module, given: object, output: Tensor) -> None:
        output.register_hook(keep)  # type: ignore[no-untyped-call]

    model[2].register_forward_hook(follow)
    watched = Watched(model, readiness=True, scaler=scaler)

    def work() -> None:
        scaler.scale(model(x).square().mean()).backward()

    seen = watched.step(work)
    unscaled = gradients[0] / 2.0**10
    assert seen.histograms["2.grad_output"].tolist() == exponent_histogram(unscaled).tolist()
    assert seen.row("2.grad_output")[AMAX] == pytest.approx(float(unscaled.abs().max()))


def test_included_modules_are_observed_instead() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    watched = Watched(model, readiness=True, include="1")
    seen = watched.step(lambda: train(model, torch.randn(4, 8)))
    assert seen.histograms.keys() == {"1.input", "1.weight", "1.grad_output"}
