"""The same tensors through torchao: equal bit for bit where the definitions agree, and where they do not.

docs/kernels.md lists the differences; each has its test here, so that it is known when one goes away.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torchao.float8.config import Float8LinearConfig, ScalingGranularity
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from fp8scope_kernels import (
    E4M3,
    E5M2,
    CurrentScaling,
    Format,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    amax_to_scale,
    measure,
    quantize,
    quantize_blocks,
    set_backend,
)
from fp8scope_kernels.backends import Backend, get_backend

formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
powers = pytest.mark.parametrize("power_of_two", [False, True])


@pytest.fixture(params=["reference", "compiled"], autouse=True)
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    before: Backend = get_backend()
    set_backend(request.param)
    yield
    assert get_backend() == request.param
    set_backend(before)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(96, 80, generator=generator)
    spread = normal * torch.exp2(torch.randint(-12, 3, normal.shape, generator=generator).float())
    return [t.to(dtype) for t in (normal, spread, 1e-3 * normal, 100 * normal, normal[:1, :1], -normal.abs())]


def theirs(
    x: Tensor, fmt: Format, *, rowwise: bool = False, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """torchao's data and scale, which is a multiplier as ours is."""
    assert fmt.dtype is not None
    result = hp_tensor_to_float8_dynamic(
        x,
        fmt.dtype,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE,
        axiswise_dim=-1 if rowwise else None,
        round_scales_to_power_of_2=power_of_two,
    )
    return result._data, result._scale


def ours(x: Tensor, fmt: Format, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    extent = measure(x)
    scale = amax_to_scale(extent.amax, fmt, power_of_two=power_of_two)
    return quantize(x, scale, fmt, extent=extent).data, scale


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@formats
@dtypes
@powers
def test_it_works(fmt: Format, dtype: torch.dtype, power_of_two: bool) -> None:
    """A scale per tensor."""
    for x in tensors(dtype):
        data, scale = ours(x, fmt, power_of_two)
        expected, expected_scale = theirs(x, fmt, power_of_two=power_of_two)
        assert torch.equal(scale, expected_scale)
        assert_same_bits(data, expected)


@formats
@dtypes
@powers
def test_a_scale_per_row(fmt: Format, dtype: torch.dtype, power_of_two: bool) -> None:
    for x in tensors(dtype):
        recipe = RowwiseScaling(power_of_two=power_of_two)
        quantized = quantize_blocks(x, fmt, (1, 0), recipe, dtype=fmt.dtype or x.dtype)
        expected, expected_scale = theirs(x, fmt, rowwise=True, power_of_two=power_of_two)
        assert torch.equal(quantized.scale.reshape(-1, 1), expected_scale)
        assert_same_bits(quantized.values, expected)


@formats
def test_every_float32_amax_has_the_same_scale(fmt: Format) -> None:
    """Theirs divides in float64 and rounds, which for a quotient of two float32 changes nothing."""
    bits = torch.randint(0x2D000000, 0x7F000000, (4096,), generator=torch.Generator().manual_seed(2))
    x = bits.to(torch.int32).view(torch.float32).unsqueeze(1)
    assert torch.equal(amax_to_scale(x, fmt), theirs(x, fmt, rowwise=True)[1])


def test_difference_all_zeros() -> None:
    """An amax of 0 means a scale of 1 here; theirs goes on with 1e-12. Zeros they remain."""
    x = torch.zeros(4, 16)
    data, scale = ours(x, E4M3)
    expected, expected_scale = theirs(x, E4M3)
    assert scale == 1
    assert expected_scale == torch.tensor(448 / 1e-12)
    assert_same_bits(data, expected)


def test_difference_tiny_tensors() -> None:
    """Below an amax of 1e-12 their scale stops growing, and what is far below it is flushed."""
    x = torch.full((4, 16), 1e-16)
    data, scale = ours(x, E4M3)
    expected, expected_scale = theirs(x, E4M3)
    assert scale > 1000 * expected_scale
    assert (data.float() == 448).all()
    assert (expected.float() < 0.1).all()


def test_difference_scales_just_below_a_power_of_two() -> None:
    """Theirs takes the exponent from a rounded logarithm: one step too much, and the maximum saturates."""
    x = torch.nextafter(torch.tensor([[448.0 / 1024]]), torch.tensor(1.0))
    scale, expected_scale = ours(x, E4M3, power_of_two=True)[1], theirs(x, E4M3, power_of_two=True)[1]
    assert scale == 512
    assert expected_scale == 1024
    assert (x * expected_scale > E4M3.max).all()


@pytest.mark.parametrize(("bad", "becomes"), [(torch.nan, "nan"), (torch.inf, "zero")])
def test_difference_non_finite_elements(bad: float, becomes: str) -> None:
    """It takes the whole tensor along there; here it is counted, and the others keep their scale."""
    x = tensors(torch.float32)[0]
    whole, _ = ours(x, E4M3)
    x[3, 4] = bad
    others = torch.ones_like(x, dtype=torch.bool)
    others[3, 4] = False
    data, expected = ours(x, E4M3)[0].float(), theirs(x, E4M3)[0].float()
    assert torch.equal(data[others], whole.float()[others])
    assert expected[others].isnan().all() if becomes == "nan" else (expected[others] == 0).all()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (CurrentScaling(), "tensorwise"),
        (RowwiseScaling(power_of_two=True, fp8_format="E4M3"), "rowwise"),
    ],
    ids=["tensorwise", "rowwise"],
)
def test_layers_differ_by_rounding_only(recipe: Recipe, name: str) -> None:
    """Theirs rounds each dequantised operand to BF16 before it multiplies, ours only the product."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    layers: list[nn.Module] = [
        Fp8Linear.from_linear(linear, recipe),
        Float8Linear.from_float(linear, config=config),
    ]
    results = []
    for layer in layers:
        linear.zero_grad()
        x = tensors(torch.bfloat16)[0][:, :64].clone().requires_grad_()
        output = layer(x)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).bfloat16())
        assert x.grad is not None and linear.weight.grad is not None
        results.append([output.detach(), x.grad, linear.weight.grad.clone()])
    for actual, expected in zip(*results, strict=True):
        error = (actual.double() - expected.double()).norm() / expected.double().norm()
        assert error < 2**-7
