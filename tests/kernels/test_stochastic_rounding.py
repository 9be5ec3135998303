"""Stochastic rounding: next to the value, right on average, reproducible, and counted."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8scope_kernels import (
    DATA_FORMATS,
    E4M3,
    E5M2,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    Fp8Linear,
    Recipe,
    StatisticsBuffer,
    observe,
    quantize,
    quantize_values,
    recipe_from_dict,
    round_stochastically,
)

data_formats = pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def representable(fmt: Format) -> Tensor:
    values: Tensor = torch.unique(fmt.table[torch.isfinite(fmt.table)])
    return values


def test_it_works() -> None:
    """2.1 lies between 2 and 2.25: two times in five it becomes the latter."""
    q = quantize(torch.full((10_000,), 2.1), torch.tensor(1.0), E4M3, stochastic=seeded()).data.float()
    assert set(q.tolist()) == {2.0, 2.25}
    assert q.mean().item() == pytest.approx(2.1, abs=0.01)


@data_formats
@pytest.mark.parametrize("share", [0.5, 0.1, 2.0**-6])
def test_it_is_unbiased(fmt: Format, share: float) -> None:
    """Between each two neighbours the upper one comes up as often as a binomial count may: within 5 sigma."""
    values = representable(fmt)
    low, high = values[:-1], values[1:]
    x = low + share * (high - low)
    trials = 4000
    rounded = round_stochastically(x.repeat(trials, 1), fmt, seeded())
    assert ((rounded == low) | (rounded == high)).all()
    # Exact in float32 for normal numbers; x itself may have been rounded a little.
    chance = ((x.double() - low.double()) / (high - low).double()).clamp(0, 1)
    # Two values next to each other share the sign, so that rounding is away from zero with the same chance.
    ups = (rounded == high).double().sum(0)
    sigma = (trials * chance * (1 - chance)).sqrt()
    assert ((ups - trials * chance).abs() <= 5 * sigma).all()
    # All of them together, where a small common bias would show: within 4 sigma.
    assert (ups - trials * chance).sum().abs() <= 4 * sigma.square().sum().sqrt()


@data_formats
def test_representable_values_are_unchanged(fmt: Format) -> None:
    values = representable(fmt)
    for seed in range(20):
        assert torch.equal(round_stochastically(values, fmt, seeded(seed)), values)


@given(
    values=st.lists(st.floats(width=32, allow_infinity=False), max_size=30),
    fmt=st.sampled_from(list(DATA_FORMATS.values())),
    seed=st.integers(0, 2**31),
)
def test_rounds_to_a_neighbour(values: list[float], fmt: Format, seed: int) -> None:
    x = torch.tensor(values, dtype=torch.float32).clamp(-fmt.max, fmt.max)
    rounded = round_stochastically(x, fmt, seeded(seed))
    known = representable(fmt)
    for value, result in zip(x.tolist(), rounded.tolist(), strict=True):
        if math.isnan(value):
            assert math.isnan(result)
            continue
        assert result in (known[known <= value].max().item(), known[known >= value].min().item())


def test_the_same_seed_gives_the_same_result() -> None:
    x, s = torch.randn(1000, generator=seeded()), torch.tensor(100.0)
    first, again, other = (quantize_values(x, s, E5M2, stochastic=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    one = quantize_values(x, s, E5M2, stochastic=True)
    torch.manual_seed(5)
    assert torch.equal(quantize_values(x, s, E5M2, stochastic=True), one)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_statistics_describe_the_rounded_values(fmt: Format) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    q = quantize(x, torch.tensor(1.0), fmt, row, stochastic=seeded()).data.double()
    wide = x.double()
    finite = torch.isfinite(wide)
    limit = torch.nextafter(torch.tensor(fmt.max), torch.tensor(torch.inf)).double()
    assert dict(zip(STATISTICS, row.tolist(), strict=True)) == {
        "numel": 2**16,
        "amax": wide[finite].abs().max().item(),
        "scale": 1,
        "saturated": (finite & (wide.abs() > limit)).sum().item(),
        "underflow": ((wide != 0) & (q == 0)).sum().item(),
        "subnormal": ((q != 0) & (q.abs() < fmt.smallest_normal)).sum().item(),
        "nonfinite": (~finite).sum().item(),
    }
    assert q.isnan().equal(~finite)


def test_bytes_and_values_agree() -> None:
    x, s = torch.randn(64, 33, generator=seeded()), torch.tensor(3.0)
    data = quantize(x, s, E4M3, stochastic=seeded(3)).data
    assert torch.equal(data.bfloat16(), quantize_values(x, s, E4M3, stochastic=seeded(3)))
    assert quantize(x[:0], s, E4M3, stochastic=seeded()).data.shape == (0, 33)


def test_it_needs_clamping() -> None:
    with pytest.raises(ValueError, match="saturate=True"):
        quantize(torch.ones(3), torch.tensor(1.0), E4M3, saturate=False, stochastic=True)


@pytest.mark.parametrize("recipe", [DelayedScaling, CurrentScaling])
def test_a_recipe_rounds_only_gradients_stochastically(recipe: type[Recipe]) -> None:
    """Gradients two fifths of a step above a value of E5M2: the weight's gradient keeps these two fifths."""
    layer = Fp8Linear(16, 16, bias=False, recipe=recipe(stochastic_gradients=True))
    buffer = StatisticsBuffer()
    observe(torch.nn.Sequential(layer), buffer)
    torch.manual_seed(1)
    x = torch.ones(4096, 16)
    gradient = torch.full((4096, 16), 1.1)
    gradient[0] = 1.75  # the largest value there is without an exponent, so that s is a power of two
    assert torch.equal(layer(x), layer(x))
    layer(x).backward(gradient)
    assert layer.weight.grad is not None
    exact = gradient.sum(0)[:, None].expand(16, 16)
    torch.testing.assert_close(layer.weight.grad, exact, rtol=0.02, atol=0)
    nearest = Fp8Linear(16, 16, bias=False, recipe=recipe())
    nearest(x).backward(gradient)
    assert nearest.weight.grad is not None
    assert ((nearest.weight.grad - exact).abs() > 0.05 * exact).all()
    assert (buffer.data[:, STATISTICS.index("numel")] > 0).all()


def test_recipes_without_stochastic_rounding_refuse_it() -> None:
    assert recipe_from_dict(CurrentScaling(stochastic_gradients=True).to_dict()).stochastic_gradients
    with pytest.raises(ValueError, match="rounds to nearest"):
        BlockScaling(stochastic_gradients=True)
    with pytest.raises(ValueError, match="stochastic_gradients needs saturate=True"):
        CurrentScaling(stochastic_gradients=True, saturate=False)
    with pytest.raises(ValueError, match="stochastic_gradients must be True or False"):
        CurrentScaling(stochastic_gradients=1)  # type: ignore[arg-type]
