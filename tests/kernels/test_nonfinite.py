"""An Inf or NaN element reaches what depends on it: as NaN in q, so that a loss scaler sees the overflow."""

import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from kernels.helpers.values import empty_row
from torch import Tensor, nn

from fp8scope_kernels import (
    DATA_FORMATS,
    E4M3,
    E5M2,
    MXFP8,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    Fp8AdamW,
    Fp8GradientReducer,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    measure,
    quantize,
    quantize_blocks,
    quantize_values,
    recipe_from_dict,
    set_backend,
)
from fp8scope_kernels.backends import Backend
from fp8scope_kernels.linear_product import PRODUCTS, Product
from fp8scope_kernels.recipes import ROLES, Nonfinite

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "delayed, unsaturated": DelayedScaling(saturate=False, margin=3),
    "current": CurrentScaling(),
    "current, powers of two": CurrentScaling(power_of_two=True),
    "current, at random": CurrentScaling(stochastic_gradients=True),
    "rows": RowwiseScaling(),
    "blocks": BlockScaling(),
    "blocks, float32 scales": BlockScaling(power_of_two=False),
    "MX": MXFP8(),
    "MX, floor": MXFP8(rounding="floor"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
BLOCKS = {
    "rows": (1, 0),
    "blocks": (1, 128),
    "blocks, float32 scales": (128, 128),
    "MX": (1, 32),
    "MX, floor": (1, 32),
}
BACKENDS = ["reference", "compiled"]
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
formats = pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
NUMEL, NONFINITE = STATISTICS.index("numel"), STATISTICS.index("nonfinite")


pytestmark = pytest.mark.usefixtures("automatic_backend")


def spoilt(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix with one NaN, one Inf and one -Inf."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1, 7], x[-1, -1] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


class Steps:
    """Twelve steps of a bias-free model in float16, as an unchanged script takes them."""

    def __init__(self, recipe: Recipe | None, products: tuple[Product, ...] | None = None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 32, bias=False))
        if recipe is not None:
            assert len(convert(model, recipe, include="*").converted) == 2
        for layer in model:
            if isinstance(layer, Fp8Linear):
                layer.products = products
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=5)
        self.skipped = 0
        for step in range(12):
            data = torch.Generator().manual_seed(step)
            x, target = torch.randn(32, 64, generator=data), torch.randn(32, 32, generator=data)
            with torch.autocast("cpu", torch.float16):
                loss = (model(0.3 * x).float() - 3.5 * target).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            self.skipped += scaler.get_scale() < before
        self.scale = math.log2(scaler.get_scale())
        self.finite = all(bool(p.isfinite().all()) for p in model.parameters())


@on_each_backend
@recipes
def test_it_works(recipe: Recipe, backend: Backend) -> None:
    """The loss scaler skips the steps that it skips without FP8."""
    plain = Steps(None)
    assert (plain.skipped, plain.scale) == (9, 21)
    set_backend(backend)
    ours = Steps(recipe)
    assert (ours.skipped, ours.scale, ours.finite) == (9, 21, True)


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_loss_scaler_sees_overflow_with_one_product_in_fp8(product: Product) -> None:
    ours = Steps(CurrentScaling(), (product,))
    assert (ours.skipped, ours.scale, ours.finite) == (9, 21, True)


def test_clamping_hides_non_finite_elements() -> None:
    ours = Steps(CurrentScaling(nonfinite="clamp"))
    assert (ours.skipped, ours.scale) == (0, 32)


@on_each_backend
@formats
@dtypes
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "at random"])
@pytest.mark.parametrize("nonfinite", ["propagate", "clamp"])
def test_non_finite_elements_become_nan_or_the_largest_value(
    backend: Backend, fmt: Format, dtype: torch.dtype, stochastic: bool, nonfinite: Nonfinite
) -> None:
    set_backend(backend)
    x, scale = spoilt(5, 33, dtype), torch.tensor(0.5)
    bad, infinite = ~torch.isfinite(x), torch.isinf(x)
    extents = (None, measure(x))
    for extent in extents:
        for row in (None, empty_row()):
            q = quantize_values(x, scale, fmt, row, extent=extent, stochastic=stochastic, nonfinite=nonfinite)
            assert torch.equal(q.isnan(), bad if nonfinite == "propagate" else x.isnan())
            if nonfinite == "clamp":
                assert q[infinite].tolist() == [fmt.max, -fmt.max]
            if fmt.dtype is not None:
                data = quantize(
                    x, scale, fmt, row, extent=extent, stochastic=stochastic, nonfinite=nonfinite
                ).data
                assert torch.equal(data.float().isnan(), q.isnan())
            if row is not None:
                assert row[NONFINITE] == 3 * row[NUMEL] / x.numel()
                assert row[STATISTICS.index("amax")] == x[~bad].abs().max()


@on_each_backend
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_unsaturated_casts_give_nan_too(fmt: Format, backend: Backend) -> None:
    set_backend(backend)
    x = torch.tensor([1.0, 1e6, torch.inf, -torch.inf, torch.nan])
    q = quantize(x, torch.tensor(1.0), fmt, saturate=False).data.float()
    assert q.isnan().tolist() == [False, fmt is E4M3, True, True, True]
    clamped = quantize(x, torch.tensor(1.0), fmt, saturate=False, nonfinite="clamp").data.float()
    assert clamped.isinf().tolist() == [False, *[fmt is E5M2] * 3, False]


@on_each_backend
@pytest.mark.parametrize("measured", [False, True], ids=["unmeasured", "measured"])
@pytest.mark.parametrize("counted", [False, True], ids=["uncounted", "counted"])
@pytest.mark.parametrize("scale", [1e38, 3e38, torch.inf])
@dtypes
def test_finite_elements_that_overflow_by_scaling_saturate(
    backend: Backend, measured: bool, counted: bool, scale: float, dtype: torch.dtype
) -> None:
    """x is finite, x * s is not: that is M, and none of the non-finite elements."""
    set_backend(backend)
    x = torch.ones(5000, dtype=dtype)
    x[1], x[2500], x[4000], x[4999] = -60_000, 60_000, torch.inf, torch.nan
    bad = ~torch.isfinite(x)
    row = empty_row() if counted else None
    extent = measure(x) if measured else None
    q = quantize_values(x, torch.tensor(scale), E4M3, row, extent=extent)
    assert torch.equal(q.isnan(), bad)
    assert torch.equal(q[~bad], x[~bad].sign().bfloat16() * E4M3.max)
    data = quantize(x, torch.tensor(scale), E4M3, row, extent=extent).data
    assert torch.equal(data.float().nan_to_num(-1.0), q.float().nan_to_num(-1.0))
    if row is not None:
        assert row[[STATISTICS.index("saturated"), NONFINITE]].tolist() == [2 * 4998, 4]


@on_each_backend
@pytest.mark.parametrize("name", BLOCKS)
@dtypes
@pytest.mark.parametrize("nonfinite", ["propagate", "clamp"])
def test_a_non_finite_element_does_not_affect_its_block(
    backend: Backend, name: str, dtype: torch.dtype, nonfinite: Nonfinite
) -> None:
    """Its block's other elements, and their scale, are what they were without it."""
    set_backend(backend)
    x, row, block_row = spoilt(130, 70, dtype), empty_row(), torch.zeros(5, dtype=torch.float64)
    recipe = dataclasses.replace(RECIPES[name], nonfinite=nonfinite)
    bad = ~torch.isfinite(x)
    for stored in (torch.bfloat16, E4M3.dtype):
        assert stored is not None
        quantized = quantize_blocks(x, E4M3, BLOCKS[name], recipe, row, block_row, dtype=stored)
        q = quantized.values.float()
        assert torch.equal(q.isnan(), bad if nonfinite == "propagate" else x.isnan())
        without = quantize_blocks(x.masked_fill(bad, 0), E4M3, BLOCKS[name], recipe, dtype=stored)
        assert torch.equal(q[~bad], without.values.float()[~bad])
        assert torch.equal(quantized.scale, without.scale)
        if nonfinite == "clamp":
            assert q[torch.isinf(x)].tolist() == [E4M3.max, -E4M3.max]
    assert row[NONFINITE] == 2 * 3


@on_each_backend
@recipes
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_only_results_that_depend_on_a_nan_are_nan(recipe: Recipe, backend: Backend, bad: float) -> None:
    """And nothing else: the rows of x, of dX and of dW that it does not enter stay finite."""
    set_backend(backend)
    torch.manual_seed(0)
    layer = Fp8Linear(32, 48, bias=False, recipe=recipe)
    buffer = StatisticsBuffer()
    layer.slots = {role: buffer.register(role, format=E4M3, shape=(1,), role=role) for role in ROLES}
    x, grad = torch.randn(8, 32, requires_grad=True), torch.randn(8, 48)
    layer(x).backward(grad)
    layer.zero_grad()
    x.grad = None
    grad[2, 5] = bad
    layer(x).backward(grad)
    assert x.grad is not None and layer.weight.grad is not None
    assert x.grad.isnan().any(1).nonzero().flatten().tolist() == [2]
    assert layer.weight.grad.isnan().any(1).nonzero().flatten().tolist() == [5]
    spoilt_x = x.detach().clone()
    spoilt_x[3, 4] = bad
    assert layer(spoilt_x).isnan().all(1).nonzero().flatten().tolist() == [3]
    with torch.no_grad():
        layer.weight[7, 0] = bad
    assert layer(x).isnan().all(0).nonzero().flatten().tolist() == [7]
    layer.eval()
    assert layer(x).isnan().all(0).nonzero().flatten().tolist() == [7]
    counts = dict(zip(ROLES, buffer.data[:, NONFINITE].tolist(), strict=True))
    assert counts == {"input": 1, "weight": 1, "grad_output": 1}


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("nonfinite", ["propagate", "clamp"])
def test_compiled_graphs(fmt: Format, nonfinite: Nonfinite) -> None:
    torch.compiler.reset()

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones(())
        return quantize(x, one, fmt, nonfinite=nonfinite).data, quantize_values(
            x, one, fmt, nonfinite=nonfinite
        )

    x = spoilt(4, 16)
    for q in torch.compile(cast, backend="aot_eager", fullgraph=True)(x):
        expected = ~torch.isfinite(x) if nonfinite == "propagate" else x.isnan()
        assert torch.equal(q.float().isnan(), expected)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_optimizer_stores_non_finite_moments_as_nan(level: Any) -> None:
    """An Inf gradient is NaN in both moments, which are FP8 and FP16, as it is in the weight."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = Fp8AdamW([parameter], level=level)
    parameter.grad = torch.tensor([torch.inf, 1.0])
    optimizer.step()
    state = optimizer.state[parameter]
    for key in ("exp_avg", "exp_avg_sq", "master"):
        assert state[key].float().isnan().tolist() == [True, False], key


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_reduced_gradients(fmt: Format) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1.0, torch.inf, torch.nan, -torch.inf])
    Fp8GradientReducer([("weight", parameter)], format=fmt).reduce()
    assert parameter.grad.isnan().tolist() == [False, True, True, True]


@recipes
def test_older_stored_recipes_have_the_default(recipe: Recipe) -> None:
    """As a dict, and as part of a pickled model."""
    assert recipe.nonfinite == "propagate"
    stored = recipe.to_dict()
    assert stored.pop("nonfinite") == "propagate"
    assert recipe_from_dict(stored) == recipe
    object.__delattr__(recipe_copy := pickle.loads(pickle.dumps(recipe)), "nonfinite")
    assert pickle.loads(pickle.dumps(recipe_copy)) == recipe
    layer = Fp8Linear(16, 16, recipe=recipe_copy)
    assert pickle.loads(pickle.dumps(layer))(torch.full((2, 16), torch.inf)).isnan().all()


def test_refuses_invalid_options() -> None:
    with pytest.raises(ValueError, match=r"nonfinite must be one of propagate, clamp, got 'drop'"):
        CurrentScaling(nonfinite="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nonfinite must be one of propagate, clamp, got 'drop'"):
        quantize(torch.ones(2), torch.ones(()), E4M3, nonfinite="drop")  # type: ignore[arg-type]
