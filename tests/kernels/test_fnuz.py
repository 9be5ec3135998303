"""Each recipe in the formats with one NaN and no -0, on all bfloat16 patterns: the bytes of ml_dtypes."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from kernels.helpers.values import all_bfloat16, empty_row
from numpy.typing import NDArray
from torch import Tensor, nn

from fp8scope_kernels import (
    E4M3FNUZ,
    E5M2FNUZ,
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    ScalingState,
    StatisticsBuffer,
    convert,
    measure,
    observe,
    quantize,
    quantize_blocks,
    set_backend,
)
from fp8scope_kernels.backends import Backend
from fp8scope_kernels.recipes import Role

Floats = NDArray[np.float32]
WITNESSES = {"E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz}
NAN = 0x80
TENSOR_RECIPES: list[Recipe] = [
    DelayedScaling(fp8_encoding="fnuz"),
    DelayedScaling(fp8_encoding="fnuz", margin=2),
    CurrentScaling(fp8_encoding="fnuz"),
    CurrentScaling(fp8_encoding="fnuz", power_of_two=True),
]
BLOCK_RECIPES: list[Recipe] = [
    RowwiseScaling(fp8_encoding="fnuz"),
    RowwiseScaling(fp8_encoding="fnuz", power_of_two=True),
    BlockScaling(fp8_encoding="fnuz", fp8_format="HYBRID"),
    BlockScaling(fp8_encoding="fnuz", fp8_format="HYBRID", power_of_two=False),
    MXFP8(fp8_encoding="fnuz", fp8_format="HYBRID"),
    MXFP8(fp8_encoding="fnuz", fp8_format="HYBRID", rounding="floor"),
]


def name_of(value: object) -> str:
    return repr(value).replace("fp8_encoding='fnuz'", "") if isinstance(value, Recipe) else str(value)


@pytest.fixture(params=["compiled", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    chosen: Backend = request.param
    set_backend(chosen)
    yield
    set_backend("auto")


def expected_scale(amax: Floats, format: Format, recipe: Recipe) -> Floats:
    """M / amax by the rule of the recipe, in float32; 1 where amax is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        if isinstance(recipe, MXFP8) and recipe.rounding == "floor":
            power = np.exp2(np.floor(np.log2(np.maximum(amax, np.float32(2.0**-126)).astype(np.float64))))
            scale = np.minimum(2.0**format.max_exponent / power, 2.0**127)
        else:
            margin = 2.0 ** -getattr(recipe, "margin", 0)
            scale = np.float32(format.max * margin) / amax
            info = np.finfo(np.float32)
            scale = np.clip(scale, info.tiny, info.max)
            if isinstance(recipe, MXFP8) or getattr(recipe, "power_of_two", False):
                scale = np.exp2(np.floor(np.log2(scale.astype(np.float64))))
    return np.where(amax > 0, scale, 1).astype(np.float32)


def check(x: Floats, scale: Floats, data: Tensor, row: Tensor, format: Format) -> None:
    """The bytes and counts of x times its scales, by brute force."""
    finite = np.isfinite(x)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(finite, x * scale, 0)
    cast = np.clip(scaled, -format.max, format.max).astype(WITNESSES[format.name])
    codes = np.where(finite, cast.view(np.uint8), NAN)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), codes)
    magnitude = np.abs(cast.astype(np.float32))
    assert not (codes[finite] == NAN).any()
    assert row[0] == x.size
    assert row[3] == (finite & (np.abs(scaled) > format.limit)).sum()
    assert row[4] == (finite & (x != 0) & (magnitude == 0)).sum()
    assert row[5] == (finite & (magnitude > 0) & (magnitude < format.smallest_normal)).sum()
    assert row[6] == (~finite).sum()


roles = pytest.mark.parametrize("role", ["input", "grad_output"])


@roles
@pytest.mark.parametrize("recipe", TENSOR_RECIPES, ids=name_of)
def test_it_works(recipe: Recipe, role: Role) -> None:
    """One scale for a tensor; several exponents of bfloat16 are its largest in turn."""
    format = recipe.format_of(role)
    assert format is (E4M3FNUZ if role == "input" else E5M2FNUZ)
    patterns = all_bfloat16().view(512, 128)
    for exponent in (0, 1, 50, 126, 127, 128, 134, 254):
        limit = 2.0 ** (exponent - 126) if exponent < 254 else torch.inf
        x = patterns.masked_fill((patterns.abs() >= limit) & patterns.isfinite(), 0.0)
        state, row = ScalingState(recipe, format), empty_row()
        assert state.format is format
        scale = state.next_scale(measure(x).amax)
        values = x.float().numpy()
        amax = np.max(np.abs(values[np.isfinite(values)]))
        np.testing.assert_array_equal(scale.numpy(), expected_scale(amax, format, recipe))
        check(values, scale.numpy(), quantize(x, scale, format, row).data, row, format)


@roles
@pytest.mark.parametrize("recipe", BLOCK_RECIPES, ids=name_of)
def test_a_scale_for_each_block(recipe: Recipe, role: Role) -> None:
    """A row of 128 patterns has one exponent; shifted by a row's share, blocks have mixed ones too."""
    format, grid = recipe.format_of(role), recipe.block_of(role)
    assert grid is not None and format.dtype is not None
    patterns = all_bfloat16()
    for x in (patterns.view(512, 128), patterns.view(128, 512).t().contiguous()):
        row = empty_row()
        quantized = quantize_blocks(x, format, grid, recipe, row, dtype=format.dtype)
        values = x.float().numpy()
        width = quantized.grid[1]
        blocks = np.where(np.isfinite(values), np.abs(values), 0).reshape(len(values), -1, width)
        scale = expected_scale(blocks.max(2), format, recipe)
        np.testing.assert_array_equal(quantized.scale.numpy().reshape(scale.shape), scale)
        check(values, np.repeat(scale, width, 1), quantized.values, row, format)


def test_every_value_is_its_own_cast() -> None:
    for format in (E4M3FNUZ, E5M2FNUZ):
        data = quantize(format.table, torch.tensor(1.0), format).data
        assert torch.equal(data.view(torch.uint8), torch.arange(256, dtype=torch.uint8))


def test_a_layer_names_and_uses_the_formats_of_its_recipe() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    convert(model, CurrentScaling(fp8_encoding="fnuz"))
    buffer = StatisticsBuffer()
    observe(model, buffer)
    assert [info.format for info in buffer.catalogue] == ["E4M3FNUZ", "E4M3FNUZ", "E5M2FNUZ"]
    model(torch.randn(64, 32)).square().sum().backward()
    # Scaled by its own maximum: 448 / amax would saturate.
    assert not buffer.data[:, 3].any()
    (layer,) = model
    assert isinstance(layer, Fp8Linear)
    amaxes, scales = buffer.data[:, 1], buffer.data[:, 2]
    maxima = torch.tensor([E4M3FNUZ.max, E4M3FNUZ.max, E5M2FNUZ.max], dtype=torch.float64)
    torch.testing.assert_close(amaxes * scales, maxima, rtol=1e-6, atol=0.0)
