"""Products of all experts at once: those of one expert after the other, up to the order of summation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    E4M3,
    MXFP8,
    NVFP4,
    PRODUCTS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8GroupedLinear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    observe,
)
from fp8scope_kernels.experts import grouped_matmul
from fp8scope_kernels.matmul import Operand, multiply, without_bytes

EXPERTS, WIDTH, OUTPUTS, TOKENS = 4, 64, 32, 40
ENDS = (7, 7, 39, 40)
RECIPES = (
    DelayedScaling(),
    CurrentScaling(),
    RowwiseScaling(),
    BlockScaling(),
    BlockScaling(power_of_two=False),
    MXFP8(),
    NVFP4(stochastic_gradients=False),
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As on an accelerator; torch has the grouped product on a CPU, too. Counts its calls."""
    calls = [0]
    product = grouped_matmul.grouped_mm
    assert product is not None

    def counted(*args: Tensor, **kwargs: Tensor) -> Tensor:
        calls[0] += 1
        return product(*args, **kwargs)

    monkeypatch.setattr(grouped_matmul, "takes_groups", lambda device: True)
    monkeypatch.setattr(grouped_matmul, "grouped_mm", counted)
    monkeypatch.setattr(grouped_matmul, "_failure", "")
    yield calls


def train(layer: Fp8GroupedLinear, buffer: StatisticsBuffer) -> list[Tensor]:
    observe(layer, buffer)
    results = []
    for step in range(2):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        output = layer(x, torch.tensor(ENDS))
        output.square().sum().backward()
        assert x.grad is not None
        results += [output.detach(), x.grad]
    return results + [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("products", (None, ("fprop",), ("dgrad", "wgrad")))
@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe.kind} {getattr(recipe, 'power_of_two', True)}"
)
def test_it_works(
    recipe: Recipe,
    products: tuple[str, ...] | None,
    at_once: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    together = Fp8GroupedLinear(EXPERTS, WIDTH, OUTPUTS, True, recipe=recipe)
    apart = Fp8GroupedLinear(EXPERTS, WIDTH, OUTPUTS, True, recipe=recipe)
    apart.load_state_dict(together.state_dict())
    for layer in (together, apart):
        layer.products = products  # type: ignore[assignment]
    buffers = StatisticsBuffer(), StatisticsBuffer()
    own = train(together, buffers[0])
    in_float32 = isinstance(recipe, BlockScaling) and not recipe.power_of_two
    # Three products in each of two steps; operands in float32 are multiplied apart.
    assert at_once[0] == 2 * (3 - (len(products or PRODUCTS) if in_float32 else 0))
    monkeypatch.setattr(grouped_matmul, "takes_groups", lambda device: False)
    expected = train(apart, buffers[1])
    assert len(own) == len(expected) == 6
    for value, other in zip(own, expected, strict=True):
        # BF16's rounding of sums in another order, and of the gradients that follow from the output.
        assert ((value - other).abs() <= 2**-7 * other.abs() + 2**-8 * other.abs().amax()).all()
    if products is None:
        assert torch.equal(buffers[0].data[:, 0], buffers[1].data[:, 0])
    for info, row, other in zip(buffers[0].catalogue, buffers[0].data, buffers[1].data, strict=True):
        if info.role != "grad_output":
            # Unknown scales are NaN.
            assert torch.equal(row.nan_to_num(-1.0), other.nan_to_num(-1.0))


def test_one_expert_needs_no_group(at_once: list[int]) -> None:
    layer = Fp8GroupedLinear(EXPERTS, WIDTH, OUTPUTS, recipe=MXFP8())
    layer(torch.randn(8, WIDTH), torch.tensor([0, 8, 8, 8]))
    assert at_once[0] == 0


def test_training_goes_on_if_the_product_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Tensor, **kwargs: Tensor) -> Tensor:
        raise RuntimeError("not on this device\nat all")

    monkeypatch.setattr(grouped_matmul, "grouped_mm", failing)
    layer = Fp8GroupedLinear(EXPERTS, WIDTH, OUTPUTS, recipe=CurrentScaling())
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    with pytest.warns(RuntimeWarning, match=r"one after the other .* \(not on this device\)"):
        output = layer(x, torch.tensor(ENDS))
    output.sum().backward()
    monkeypatch.setattr(grouped_matmul, "takes_groups", lambda device: False)
    assert torch.equal(layer(x, torch.tensor(ENDS)), output)


def test_rows_that_are_not_aligned_are_multiplied_apart(at_once: list[int]) -> None:
    left = [Operand(torch.randn(5, 20).bfloat16(), torch.tensor(2.0))] * 2
    right = [Operand(torch.randn(20, 33).bfloat16(), torch.tensor(0.5))] * 2
    assert grouped_matmul.multiply_tokens(left, right, torch.float32) is None
    assert at_once[0] == 0


def fp8(rows: int, columns: int, scale: Tensor) -> Operand:
    return Operand(torch.randn(rows, columns).to(E4M3.dtype or torch.float32), scale)


@pytest.mark.parametrize("by_rows", (False, True))
def test_what_units_get(by_rows: bool) -> None:
    """Torch's own checks of the arguments, on the meta device; and what they are, as numbers."""
    sizes = (16, 3, 21)
    scales = [torch.rand(size, 1) + 0.5 if by_rows else torch.tensor(size / 10) for size in sizes]
    left = [fp8(size, WIDTH, scale) for size, scale in zip(sizes, scales, strict=True)]
    weights = [fp8(OUTPUTS, WIDTH, torch.rand(OUTPUTS, 1) if by_rows else torch.tensor(0.25)) for _ in sizes]
    right = [weight.t() for weight in weights]
    arguments = grouped_matmul._arguments_of_units(left, right, sizes)
    scaled: Any = torch._scaled_grouped_mm
    product = scaled(*(value.to("meta") for value in arguments), out_dtype=torch.bfloat16)
    assert product.shape == (sum(sizes), OUTPUTS)
    a, b, a_scale, b_scale, ends = arguments
    starts = [0, *ends.tolist()[:-1]]
    for index, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        exact = (a[start:end].float() * a_scale[start:end, None]) @ (b[index].float() * b_scale[index])
        expected = multiply(left[index], right[index], torch.float32)
        assert ((exact - expected).abs() <= 2**-8 * exact.abs() + 2**-16 * exact.abs().amax()).all()


@pytest.mark.parametrize("wrong", [(2.0, 2.0), (1.0, 2.0)], ids=["all", "the last expert"])
def test_a_product_on_units_is_compared_before_it_is_trusted(
    wrong: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of a library with wrong numbers is given up, also if they are those of one expert."""
    monkeypatch.setattr(grouped_matmul, "_unit_failure", "")
    monkeypatch.setattr(grouped_matmul, "_compared", set())
    factors = 1.0, 1.0

    def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, **_: Any) -> Tensor:
        assert len(ends) == 2
        weights = b.float() * b_scale[:, None, :]
        rows = a.float() * a_scale[:, None]
        parts = rows[:16] @ weights[0] * factors[0], rows[16:] @ weights[1] * factors[1]
        return torch.cat(parts).bfloat16()

    monkeypatch.setattr(grouped_matmul, "scaled_grouped_mm", scaled)
    left = [fp8(16, WIDTH, torch.tensor(0.5)), fp8(3, WIDTH, torch.tensor(2.0))]
    right = [fp8(OUTPUTS, WIDTH, torch.tensor(0.25)).t() for _ in left]
    values = zip(map(without_bytes, left), map(without_bytes, right), strict=True)
    exact = torch.cat([multiply(a, b, torch.float32) for a, b in values])
    own = grouped_matmul.multiply_tokens(left, right, torch.float32)
    assert own is not None and ((own - exact).abs() <= 2**-7 * exact.abs() + 1e-3).all()
    factors = wrong
    monkeypatch.setattr(grouped_matmul, "_compared", set())
    with pytest.warns(RuntimeWarning, match="its numbers are wrong"):
        again = grouped_matmul.multiply_tokens(left, right, torch.float32)
    assert again is not None and torch.equal(again, exact)
