"""Products on FP8 units: the order of scales in memory, kinds that fail or are wrong, and what is reported.

A CPU computes products with one scale, or one for each row, by torch's own `scaled_mm`. For blocks a unit is
written out here that reads the scales by their addresses, as NVIDIA documents them for cuBLAS.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.helpers.unit_layers import EVERYWHERE, assert_close, exact, make_layer, run
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    devices,
    matmul,
    observe,
    operands,
    unit_products,
)
from fp8scope_kernels.matmul import Operand, multiply

Types: Any = functional.ScalingType


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test tries each kind again, and takes FP8 operands on the CPU until a kind is given up."""
    for name, empty in (("_reasons", {}), ("_lost", set()), ("_logged", set())):
        monkeypatch.setattr(unit_products, name, empty)
    monkeypatch.setattr(
        operands, "has_fp8_units", lambda device, kind: (device, kind) not in vars(unit_products)["_lost"]
    )
    yield


def read(memory: Tensor, offset: int) -> float:
    """The number at an offset, in elements, from a tensor's address, whatever its shape."""
    return float(memory.as_strided((1,), (1,), memory.storage_offset() + offset).float())


def scale_at(scales: Tensor, kind: Any, row: int, k: int, rows: int, inner: int) -> float:
    """The scale of element (row, k) of an operand [rows, inner]."""
    if kind == Types.BlockWise1x128:
        return read(scales, row + k // 128 * rows)
    if kind == Types.BlockWise128x128:
        padded = -(-(inner // 128) // 4) * 4
        return read(scales, k // 128 + row // 128 * padded)
    assert kind == Types.BlockWise1x32 and scales.dtype == torch.float8_e8m0fnu
    tiles_across = -(-(inner // 32) // 4)
    tile = row // 128 * tiles_across + k // 128
    return read(scales, tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + k // 32 % 4)


def unit(
    a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, **options: Any
) -> Tensor:
    """The product of a [m, k] and b [k, n] in bfloat16, as cuBLAS computes it."""
    assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] % 16 == b.shape[1] % 16 == 0
    swizzle = functional.SwizzleType.SWIZZLE_32_4_4
    assert (options["swizzle_a"] == options["swizzle_b"] == swizzle) == (kind_a == Types.BlockWise1x32)
    wide = []
    for values, scales, kind in ((a, scale_a, kind_a), (b.t(), scale_b, kind_b)):
        rows, inner = values.shape
        table = torch.tensor(
            [
                [scale_at(scales, kind, row, k, rows, inner) for k in range(0, inner, 32)]
                for row in range(rows)
            ]
        )
        wide.append(values.double() * table.double().repeat_interleave(32, 1))
    return (wide[0] @ wide[1].t()).bfloat16()


NOWHERE = dict.fromkeys(EVERYWHERE, False)


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), CurrentScaling(), RowwiseScaling()], ids=lambda recipe: recipe.kind
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_scale_and_rows_by_torch(recipe: Recipe, dtype: torch.dtype) -> None:
    layer = make_layer(recipe, 64, 48).to(dtype)
    assert_close(run(layer, tokens=40), exact(make_layer(recipe, 64, 48).to(dtype), tokens=40))
    assert layer.on_units == EVERYWHERE


@pytest.mark.parametrize(
    "recipe", [BlockScaling(), BlockScaling(power_of_two=False), MXFP8(), MXFP8(rounding="floor")], ids=str
)
def test_blocks_by_a_unit_that_reads_addresses(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_mm", unit)
    layer = make_layer(recipe)
    buffer, others = StatisticsBuffer(), StatisticsBuffer()
    buffer.sampling = others.sampling = True
    observe(torch.nn.Sequential(layer), buffer)
    seen = run(layer)
    assert layer.on_units == EVERYWHERE
    other = make_layer(recipe)
    observe(torch.nn.Sequential(other), others)
    assert_close(seen, exact(other))
    assert torch.equal(buffer.data, others.data)
    assert torch.equal(buffer.block_data, others.block_data)
    assert buffer.sample_data is not None and others.sample_data is not None
    torch.testing.assert_close(buffer.sample_data, others.sample_data, rtol=1e-6, atol=0)


def test_float32_layers_get_float32_sums() -> None:
    """No rounding to BF16 between the sum and the scales."""
    for recipe in (CurrentScaling(), RowwiseScaling()):
        layer = make_layer(recipe, 64, 48).float()
        output = run(layer, tokens=40)[0]
        assert output.dtype == torch.float32
        assert not torch.equal(output, output.bfloat16().float())
        assert_close([output], [exact(layer, tokens=40)[0]])


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8()], ids=str)
@pytest.mark.parametrize("way", ["wrong", "refused"])
def test_a_kind_that_fails_is_given_up(recipe: Recipe, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def broken(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(1)
        if way == "refused":
            raise RuntimeError("cublasLt has no such kernel")
        return (a.float() @ b.float()).to(options.get("out_dtype", torch.bfloat16))

    monkeypatch.setattr(functional, "scaled_mm", broken)
    monkeypatch.setattr(unit_products, "scaled_mm", broken)
    layer = make_layer(recipe)
    reason = "its numbers are wrong" if way == "wrong" else "cublasLt has no such kernel"
    with pytest.warns(RuntimeWarning, match=f"multiplied as BF16 from now on.*{reason}"):
        first = run(layer)
    tried = len(calls)
    second = run(layer)
    assert layer.on_units == NOWHERE and len(calls) == tried
    expected = exact(layer)
    assert_close(first, expected)
    for one, other in zip(second, expected, strict=True):
        assert torch.equal(one, other)


def test_a_kind_that_fails_later_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may take the sizes of the comparison, and not others."""
    layer = make_layer(CurrentScaling(), 64, 48)
    run(layer, tokens=40)

    def refuse(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("no kernel for this size")

    monkeypatch.setattr(unit_products, "scaled_mm", refuse)
    with pytest.warns(RuntimeWarning, match="no kernel for this size"):
        seen = run(layer, tokens=40)
    assert_close(seen, exact(layer, tokens=40))


@pytest.mark.parametrize(
    ("recipe", "sizes", "on_units"),
    [
        (BlockScaling(), (256, 384, 120), {**EVERYWHERE, "wgrad": False, "fprop": False, "dgrad": False}),
        (BlockScaling(), (256, 384, 144), {**EVERYWHERE, "wgrad": False}),
        (BlockScaling(), (256, 336, 256), {**EVERYWHERE, "dgrad": False}),
        (BlockScaling(), (336, 256, 256), {**EVERYWHERE, "fprop": False}),
        (BlockScaling(), (128, 256, 256), {**EVERYWHERE, "fprop": False}),
        (MXFP8(), (96, 80, 64), {**EVERYWHERE, "dgrad": False}),
        (NVFP4(), (256, 256, 256), NOWHERE),
        (CurrentScaling(fp8_format="E5M2"), (64, 64, 64), NOWHERE),
    ],
)
def test_sizes_and_recipes_that_units_do_not_take(
    recipe: Recipe,
    sizes: tuple[int, int, int],
    on_units: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(functional, "scaled_mm", unit)
    caplog.set_level(logging.INFO, logger="fp8scope_kernels")
    inputs, outputs, tokens = sizes
    layer = make_layer(recipe, inputs, outputs)
    for _ in range(2):
        seen = run(layer, tokens)
    assert layer.on_units == on_units
    assert_close(
        seen, exact(make_layer(recipe, inputs, outputs), tokens) if not isinstance(recipe, NVFP4) else seen
    )
    lines = [record.getMessage() for record in caplog.records]
    expected = recipe.block_of("input") is not None and not isinstance(recipe, NVFP4)
    assert any("multiple" in line for line in lines) == expected
    assert len(lines) == len(set(lines))


def test_a_graph_that_is_captured_first_takes_exact_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison reads from the device, which a capture forbids."""
    values = torch.ones(16, 16).to(torch.float8_e4m3fn)
    a = Operand(values, torch.tensor(0.5))
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    captured = multiply(a, a, torch.bfloat16)
    assert not matmul.ran_on_units(a, a, torch.bfloat16)
    monkeypatch.undo()
    assert torch.equal(captured, multiply(a, a, torch.bfloat16))
    assert matmul.ran_on_units(a, a, torch.bfloat16)


def test_the_comparison_does_not_depend_on_torchs_defaults() -> None:
    a = Operand(torch.ones(16, 16).to(torch.float8_e4m3fn), torch.tensor(0.5))
    with torch.device("meta"):
        multiply(a, a, torch.bfloat16)
    assert matmul.ran_on_units(a, a, torch.bfloat16)


def test_the_smallest_and_largest_scales_of_mx() -> None:
    """E8M0 goes from 2^-127 to 2^127; 2^-127 is subnormal in float32."""
    exponents = torch.arange(-127, 128)
    inverse = torch.exp2(exponents.double()).float().view(-1, 1)
    packed = unit_products.swizzled(inverse)
    assert packed.dtype == torch.float8_e8m0fnu and packed.numel() == 256 * 4
    rows = torch.arange(255)
    codes = packed.view(torch.uint8)[rows // 128 * 512 + rows % 32 * 16 + rows % 128 // 32 * 4]
    assert torch.equal(codes.long(), exponents + 127)
