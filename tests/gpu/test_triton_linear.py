"""Fp8Linear on the Triton kernels, forward and backward, against Fp8Linear on the definition."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fp8scope_kernels.operands
from fp8scope_kernels import (
    E4M3,
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    observe,
    set_backend,
)
from fp8scope_kernels.triton import backend as triton_backend

pytestmark = pytest.mark.gpu

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(history_length=2),
    "a long history": DelayedScaling(history_length=600, amax_compute="most_recent"),
    "every other call, unsaturated": DelayedScaling(interval=2, saturate=False, margin=-3),
    "current": CurrentScaling(),
    "powers of two": CurrentScaling(power_of_two=True, margin=1),
    "rows": RowwiseScaling(),
    "blocks": BlockScaling(),
    "MX": MXFP8(),
}


@pytest.fixture(params=[False, True], ids=["values", "bytes"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Both kinds of operands; torch has the product of FP8 matrices on a CPU too."""
    monkeypatch.setattr(fp8scope_kernels.operands, "has_fp8_units", lambda *_: request.param)
    yield request.param


def train(backend: str, recipe: Recipe, device: torch.device) -> list[Tensor]:
    """Three steps of a call or two, with inputs that grow: all that is computed, scaled and counted."""
    set_backend(backend)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 80)).to(device)
    convert(model, recipe, exclude=())
    buffer = StatisticsBuffer(device=device)
    observe(model, buffer)
    seen: list[Tensor] = []
    for step in range(3):
        for micro in range(1 + step % 2):
            x = torch.randn(24, 48, generator=torch.Generator().manual_seed(10 * step + micro)).to(device)
            x = (x * 3.0**step).requires_grad_()
            output = model(x)
            output.square().mean().backward()
            assert x.grad is not None
            seen += [output.detach(), x.grad]
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        seen += [buffer.data.clone(), buffer.block_data.clone()]
        buffer.zero_()
        model.zero_grad()
    return seen + [value for name, value in model.named_buffers()]


# Operands in blocks are the same with FP8 units and without.
CASES = [
    pytest.param(recipe, units, id=f"{'bytes' if units else 'values'}-{name}")
    for name, recipe in RECIPES.items()
    for units in (False, True)
    if not (units and recipe.block_of("input"))
]


@pytest.mark.parametrize(("recipe", "units"), CASES, indirect=["units"])
def test_it_works(device: torch.device, units: bool, recipe: Recipe) -> None:
    """Every output, gradient, statistic and scaling state is the same to the last bit."""
    actual, expected = train("triton", recipe, device), train("reference", recipe, device)
    assert len(actual) == len(expected) > 15
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_delayed_scaling_reads_a_tensor_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call, one launch casts, counts and measures."""
    set_backend("triton")
    passes: list[dict[str, object]] = []
    original = triton_backend._tiles

    def noting(
        x: Tensor, scale: object, q: object, q_t: object, options: dict[str, object], *counted: object
    ) -> object:
        passes.append(options)
        return original(x, scale, q, q_t, options, *counted)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_backend, "_tiles", noting)
    layer = Fp8Linear(32, 32, device=device, recipe=DelayedScaling())
    buffer = StatisticsBuffer(device=device)
    observe(torch.nn.Sequential(layer), buffer)
    x = torch.randn(16, 32, device=device)
    layer(x)
    assert [(p["MEASURE"], p["CAST"]) for p in passes] == [(True, False), (False, True)] * 2
    passes.clear()
    layer(x)
    assert [(p["MEASURE"], p["CAST"], p["COUNT"]) for p in passes] == [(True, True, True)] * 2
    passes.clear()
    layer.eval()(x)
    assert [(p["MEASURE"], p["CAST"], p["COUNT"]) for p in passes] == [(False, True, False)] * 2


def test_what_the_backward_product_reads_is_contiguous(device: torch.device, units: bool) -> None:
    set_backend("triton")
    layer = Fp8Linear(32, 48, device=device, recipe=CurrentScaling())
    operand, turned = layer.quantize("input", torch.randn(16, 32, device=device), update=True, transpose=True)
    assert operand.is_fp8 == units
    assert turned.values.shape == (32, 16)
    assert turned.values.is_contiguous() == units
    assert torch.equal(turned.values.float(), operand.values.float().t())
    assert layer.state_of("input").format == E4M3
