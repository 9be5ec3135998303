"""Every recipe's products on the device's FP8 units, by the table of devices.py, against BF16 operands."""

import warnings

import pytest
import torch
from kernels.helpers.unit_layers import EVERYWHERE, assert_close, exact, make_layer, run

from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    devices,
    unit_products,
)

pytestmark = pytest.mark.gpu

RECIPES: tuple[Recipe, ...] = (
    *(DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling()),
    *(BlockScaling(power_of_two=False), MXFP8(), MXFP8(rounding="floor")),
)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("sizes", [(256, 384, 256), (1024, 640, 384)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_works(
    device: torch.device, recipe: Recipe, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs, outputs, tokens = sizes
    layer = make_layer(recipe, inputs, outputs, device).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = run(layer, tokens)
    has_units = unit_products.granularity_of(recipe) in devices.capabilities_of(device).units
    assert layer.on_units == dict.fromkeys(EVERYWHERE, has_units)
    assert_close(seen, exact(make_layer(recipe, inputs, outputs, device).to(dtype), tokens))
