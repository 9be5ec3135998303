"""Fp8Linear: its products and gradients, the shapes and dtypes it takes, and its switch."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fp8scope_kernels.operands
from fp8scope_kernels import (
    CurrentScaling,
    DelayedScaling,
    Format,
    Fp8Linear,
    Recipe,
    amax_to_scale,
    quantize,
    tensor_to_amax,
)

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "power of two": CurrentScaling(power_of_two=True),
    "all E4M3": CurrentScaling(fp8_format="E4M3"),
    "all E5M2": CurrentScaling(fp8_format="E5M2"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@pytest.fixture(params=[False, True], ids=["values", "bytes"], autouse=True)
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Every test runs on both kinds of operands; torch has the FP8 operator on a CPU too, only slowly."""
    if request.param:
        monkeypatch.setattr(fp8scope_kernels.operands, "has_fp8_units", lambda *_: True)
    yield request.param


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(recipe: Recipe, bias: bool = True, dtype: torch.dtype = torch.float32) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(64, 32, bias=bias, dtype=dtype, recipe=recipe)


def dequantized(x: Tensor, recipe: Recipe, fmt: Format) -> Tensor:
    """What the layer is said to multiply, in float64; for a first call delayed scaling is current scaling."""
    power_of_two = isinstance(recipe, CurrentScaling) and recipe.power_of_two
    scale = amax_to_scale(tensor_to_amax(x), fmt, power_of_two=power_of_two)
    return quantize(x, scale, fmt).data.double() / scale.double()


def assert_bfloat16_close(actual: Tensor, exact: Tensor) -> None:
    """Within BF16's rounding of the product and of its scaling, and float32's of the sum."""
    bound = exact.abs() * 2 * 2**-8 + exact.abs().max() * 2**-20
    assert ((actual.double() - exact).abs() <= bound).all()


@recipes
def test_it_works(recipe: Recipe) -> None:
    """The three products equal float64 products of the quantised operands."""
    layer = make_layer(recipe)
    x, grad = randn(48, 64, seed=1).requires_grad_(), randn(48, 32, seed=2) * 1e-3
    output = layer(x)
    output.backward(grad)
    qx = dequantized(x, recipe, recipe.format_of("input"))
    qw = dequantized(layer.weight, recipe, recipe.format_of("weight"))
    qg = dequantized(grad, recipe, recipe.format_of("grad_output"))
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert_bfloat16_close(output - layer.bias, qx @ qw.t())
    assert_bfloat16_close(x.grad, qg @ qw)
    assert_bfloat16_close(layer.weight.grad, qg.t() @ qx)
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


@recipes
def test_gradients_are_within_the_formats_error_bound(recipe: Recipe) -> None:
    """Against float64 without quantisation: operands are off by half a unit at most, plus underflow."""
    layer = make_layer(recipe, bias=False)
    x, grad = randn(48, 64, seed=3).requires_grad_(), randn(48, 32, seed=4)
    layer(x).backward(grad)
    weight = layer.weight.detach()
    errors = {}
    for role, tensor in (("input", x.detach()), ("weight", weight), ("grad_output", grad)):
        fmt = recipe.format_of(role)  # type: ignore[arg-type]
        # A power-of-two scale may leave up to half of the range unused.
        floor = tensor.abs().max() * 2 * fmt.smallest_subnormal / fmt.max
        errors[role] = (tensor.abs() * fmt.epsilon / 2 + floor).double()
    assert x.grad is not None and layer.weight.grad is not None

    def bound(a: Tensor, ea: Tensor, b: Tensor, eb: Tensor) -> Tensor:
        a, b = a.abs().double(), b.abs().double()
        return (ea @ b + a @ eb + ea @ eb) * (1 + 2**-6) + (a @ b) * 2**-6

    dgrad = (x.grad - grad.double() @ weight.double()).abs()
    wgrad = (layer.weight.grad - grad.t().double() @ x.detach().double()).abs()
    assert (dgrad <= bound(grad, errors["grad_output"], weight, errors["weight"])).all()
    assert (wgrad <= bound(grad.t(), errors["grad_output"].t(), x.detach(), errors["input"])).all()
    assert dgrad.max() > 0


@pytest.mark.parametrize("shape", [(64,), (1, 64), (7, 64), (2, 3, 64), (2, 0, 64)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    layer = make_layer(CurrentScaling())
    x = randn(*shape, seed=5).requires_grad_()
    output = layer(x)
    assert output.shape == (*shape[:-1], 32)
    output.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    flat = layer(x.detach().reshape(-1, 64))
    assert torch.equal(output.detach().reshape(-1, 32), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_dtypes_are_kept(dtype: torch.dtype, bias: bool) -> None:
    layer = make_layer(CurrentScaling(), bias=bias, dtype=dtype)
    x = randn(16, 64, seed=6, dtype=dtype).requires_grad_()
    output = layer(x)
    output.sum().backward()
    assert output.dtype == dtype
    assert x.grad is not None and x.grad.dtype == dtype
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {dtype}
    assert len([p for p in layer.parameters() if p.grad is not None]) == (2 if bias else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    layer = make_layer(CurrentScaling())
    x = randn(16, 64, seed=7).requires_grad_()
    with torch.autocast("cpu", dtype):
        output = layer(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), layer(x), rtol=2**-6, atol=2**-7)
    output.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_large_float16_gradients_do_not_overflow_on_the_way() -> None:
    """E5M2 times E4M3 sums to more than float16 holds before the inverse scales are applied."""
    layer = make_layer(DelayedScaling(), dtype=torch.float16)
    x = torch.ones(512, 64, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        layer(x).backward(torch.ones(512, 32, dtype=torch.float16))
    assert x.grad is not None and torch.isfinite(x.grad).all()
    assert layer.weight.grad is not None and torch.isfinite(layer.weight.grad).all()


def test_computes_only_the_required_gradients() -> None:
    layer = make_layer(CurrentScaling())
    x = randn(8, 64, seed=8)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.requires_grad_(False).zero_grad()
    layer(x.requires_grad_()).sum().backward()
    assert x.grad is not None and layer.weight.grad is None


def test_precision_can_be_switched() -> None:
    layer = make_layer(DelayedScaling())
    x = randn(16, 64, seed=9)
    fp8 = layer(x)
    layer.precision = "bf16"
    expected = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()
    assert torch.equal(layer(x), expected)
    assert not torch.equal(fp8, expected)
    for _ in range(3):
        layer(1000 * x)
    layer.precision = "fp8"
    # A scale from before the time in BF16 would be stale: the layer starts afresh.
    assert torch.equal(layer(x), fp8)
    with pytest.raises(ValueError, match=r"'fp8' or 'bf16'.*'fp4'"):
        layer.precision = "fp4"  # type: ignore[assignment]


def test_delayed_scaling_saturates_grown_values_and_current_scaling_does_not() -> None:
    x = randn(16, 64, seed=10)
    delayed, current = make_layer(DelayedScaling(), bias=False), make_layer(CurrentScaling(), bias=False)
    for layer in (delayed, current):
        layer(x)
    exact = nn.functional.linear(100 * x, current.weight)
    assert (current(100 * x) - exact).norm() < 0.1 * exact.norm()
    assert (delayed(100 * x) - exact).norm() > 0.5 * exact.norm()


def test_without_saturation_grown_values_become_nan() -> None:
    layer = make_layer(DelayedScaling(saturate=False))
    x = randn(16, 64, seed=11)
    assert torch.isfinite(layer(x)).all()
    assert layer(100 * x).isnan().any()


def test_evaluation_mode_changes_nothing() -> None:
    layer = make_layer(DelayedScaling())
    x = randn(16, 64, seed=12)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    layer(100 * x)
    after = layer.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_checkpoint_restores_the_state() -> None:
    layer = make_layer(DelayedScaling(history_length=3))
    for seed in range(4):
        layer(randn(16, 64, seed=seed) * (1 + seed)).sum().backward()
    other = Fp8Linear(64, 32, recipe=DelayedScaling(history_length=3))
    other.load_state_dict(layer.state_dict())
    x = randn(16, 64, seed=13)
    assert torch.equal(other(x), layer(x))
    assert other.state_of("grad_output").calls == 4


def test_a_copy_has_its_own_state() -> None:
    layer = make_layer(DelayedScaling())
    x = randn(16, 64, seed=14)
    layer(x)
    twin = copy.deepcopy(layer)
    twin(5 * x)
    assert twin.state_of("input").calls == 2
    assert layer.state_of("input").calls == 1
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_repr_describes_the_layer() -> None:
    text = repr(make_layer(DelayedScaling()))
    assert "in_features=64, out_features=32, bias=True, recipe=DelayedScaling, precision=fp8" in text
    assert "CurrentScaling, E5M2" in repr(make_layer(CurrentScaling()))
