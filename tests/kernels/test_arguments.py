"""Public functions check what native code would trust: shapes, dtypes, devices, before they are used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    E4M3,
    E8M0,
    MXFP8,
    NVFP4,
    SAMPLE_SIZE,
    STATISTICS,
    BlockScaling,
    BlockTensor,
    CurrentScaling,
    DelayedScaling,
    Format,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    Slot,
    StatisticsBuffer,
    accumulate_sample,
    measure,
    quantize,
    quantize_blocks,
    quantize_values,
)
from fp8scope_kernels.cpu import backend as cpu_backend

RECIPES = (DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8())
X = torch.randn(32, 64)
ONE = torch.ones(())


def zeros(size: int, **options: Any) -> Tensor:
    return torch.zeros(size, **{"dtype": torch.float64, **options})


BAD_ROWS: dict[str, tuple[Callable[[int], Tensor], type[Exception], str]] = {
    "empty": (lambda size: zeros(0), ValueError, "shape"),
    "short": (lambda size: zeros(size - 1), ValueError, "shape"),
    "long": (lambda size: zeros(size + 1), ValueError, "shape"),
    "matrix": (lambda size: zeros(size).reshape(1, -1), ValueError, "shape"),
    "whole numbers": (lambda size: zeros(size, dtype=torch.int64), TypeError, "float64"),
    "elsewhere": (lambda size: zeros(size, device="meta"), ValueError, "is on meta"),
    "negated": (lambda size: torch._neg_view(zeros(size)), TypeError, "plain tensor"),
    "list": (lambda size: [0.0] * size, TypeError, "got list"),  # type: ignore[dict-item,return-value]
}
bad_rows = pytest.mark.parametrize("case", BAD_ROWS.values(), ids=BAD_ROWS)


@bad_rows
@pytest.mark.parametrize("cast", [quantize, quantize_values])
def test_it_works(cast: Callable[..., Any], case: tuple[Any, type[Exception], str]) -> None:
    make, error, text = case
    with pytest.raises(error, match=f"^row .*{text}"):
        cast(X, ONE, E4M3, make(len(STATISTICS)))


@bad_rows
@pytest.mark.parametrize("name", ["row", "block_row"])
def test_rows_of_blocks(name: str, case: tuple[Any, type[Exception], str]) -> None:
    make, error, text = case
    size = len(STATISTICS if name == "row" else BLOCK_STATISTICS)
    with pytest.raises(error, match=f"^{name} .*{text}"):
        quantize_blocks(X, E4M3, (1, 32), MXFP8(), **{name: make(size)})


@bad_rows
def test_samples(case: tuple[Any, type[Exception], str]) -> None:
    make, error, text = case
    with pytest.raises(error, match=f"^sample .*{text}"):
        accumulate_sample(make(SAMPLE_SIZE), X, X.bfloat16(), ONE)


@pytest.mark.parametrize("left", [0, 8, 8 * len(STATISTICS) - 1])
def test_a_freed_row_is_refused(left: int) -> None:
    row = zeros(len(STATISTICS))
    row.untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match="freed"):
        quantize(X, ONE, E4M3, row)


def test_a_row_with_a_gradient_of_its_own_is_counted_in() -> None:
    for stochastic in (False, True):
        row = zeros(len(STATISTICS)).requires_grad_()
        quantize(X, ONE, E4M3, row, stochastic=stochastic)
        assert row[0] == X.numel() and row.grad_fn is None


@pytest.mark.parametrize("x", [None, [1.0], 1.0])
def test_only_tensors_are_measured(x: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(x).__name__}"):
        measure(x)


@pytest.mark.parametrize(
    "values,inverse",
    [
        (X.bfloat16()[:1], ONE),
        (X.bfloat16()[:, :1], ONE),
        (X.bfloat16().t(), ONE),
        (X.bfloat16().reshape(-1), ONE),
        (X.bfloat16(), torch.ones(31, 1)),
        (X.bfloat16(), torch.ones(33, 1)),
        (X.bfloat16(), torch.ones(32)),
        (X.bfloat16(), torch.ones(1, 32, 64)),
        (X.bfloat16(), torch.ones(())[None].to("meta")),
        (X.bfloat16().to("meta"), ONE),
    ],
)
def test_a_sample_needs_values_of_each_element(values: Tensor, inverse: Tensor) -> None:
    sample = zeros(SAMPLE_SIZE)
    with pytest.raises(ValueError, match="values|inverse_scale"):
        accumulate_sample(sample, X, values, inverse)
    assert not sample.any()


@pytest.mark.parametrize("cast", [quantize, quantize_values])
def test_scales_and_formats(cast: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="scale must be a tensor"):
        cast(X, 1.0, E4M3)
    with pytest.raises(ValueError, match=r"scale must be one number, got shape \(64,\)"):
        cast(X, torch.ones(64), E4M3)
    with pytest.raises(TypeError, match="Only tensors.*got list"):
        cast([1.0], ONE, E4M3)
    with pytest.raises(TypeError, match=r"scale must be a real number, got torch\.complex64"):
        cast(X, torch.tensor(1j), E4M3)
    with pytest.raises(TypeError, match="scale has no value: it is on meta"):
        cast(X, torch.ones((), device="meta"), E4M3)
    for format in (
        Format(name="FP16", exponent_bits=5, mantissa_bits=10, bias=15, specials="ieee", dtype=torch.float16),
        E8M0,
    ):
        with pytest.raises(ValueError, match=f"{format.name} is not a format for data"):
            cast(X, ONE, format)


@pytest.mark.parametrize(
    "x,grid,recipe,error",
    [
        (X[0], (1, 32), MXFP8(), "matrix"),
        (X, (1, 16), NVFP4(), "a recipe for E2M1, not for E4M3"),
        (X[None], (1, 32), MXFP8(), "matrix"),
        (X, (-1, 32), MXFP8(), "whole numbers"),
        (X, (1.5, 32), MXFP8(), "whole numbers"),
        (X, (1, 32), CurrentScaling(), "CurrentScaling has no scale for each block"),
        (X, (1, 32), DelayedScaling(), "DelayedScaling has no scale for each block"),
    ],
)
def test_blocks(x: Tensor, grid: Any, recipe: Recipe, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        quantize_blocks(x, E4M3, grid, recipe)
    with pytest.raises(TypeError, match="Only floating-point"):
        quantize_blocks(x.int(), E4M3, (1, 32), MXFP8())


@pytest.mark.parametrize("shape", [(32, 1, 1, 1), (16, 1, 2, 1), (32, 1, 3, 1), (32, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_tensor_needs_a_scale_for_each_block(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = BlockTensor(X.bfloat16(), torch.ones(shape), (1, 32))
    with pytest.raises(ValueError, match=r"needs scales of shape \(32, 1, 2, 1\)"):
        tensor.dequantize(dtype)


def test_scales_of_blocks_in_another_dtype() -> None:
    tensor = quantize_blocks(X, E4M3, (1, 32), MXFP8())
    wide = tensor._replace(scale=tensor.scale.double())
    assert torch.equal(wide.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("index", [-1, 1, 10**6])
def test_a_slot_is_a_row_of_its_buffer(index: int) -> None:
    buffer = StatisticsBuffer(4)
    buffer.register("a", format=E4M3, shape=(1,), role="input")
    with pytest.raises(IndexError, match="rows 0 to 0"):
        Slot(buffer, index)


def test_a_buffer_recycles_its_own_storage_only() -> None:
    buffer = StatisticsBuffer(4)
    for other in (zeros(4).reshape(4, 1), zeros(4), buffer.storage.float(), buffer.storage.to("meta")):
        with pytest.raises(ValueError, match="exchange"):
            buffer.recycle(other)
    buffer.recycle(buffer.exchange())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    "bad",
    [
        torch.randn(8, 32),
        torch.randn(4, 128),
        torch.randn(2, 4, 32),
        torch.randn(()),
        torch.ones(4, 64, dtype=torch.int64),
        torch.randn(4, 64, device="meta"),
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.dtype}-{x.device}",
)
def test_a_wrong_input_changes_no_state(recipe: Recipe, warm: bool, bad: Tensor) -> None:
    layer, buffer = Fp8Linear(64, 32, recipe=recipe), StatisticsBuffer()
    layer.slots = {
        role: buffer.register(role, format=E4M3, shape=(1,), role=role)
        for role in ("input", "weight", "grad_output")
    }
    if warm:
        layer(torch.randn(4, 64)).sum().backward()
    before = [buffer.clone() for buffer in layer.buffers()]
    rows = buffer.data.clone()
    with pytest.raises(RuntimeError, match="64 features|floating-point|The input is on"):
        layer(bad)
    assert all(map(torch.equal, layer.buffers(), before))
    assert torch.equal(buffer.data, rows)


def test_norms_refuse_freed_memory() -> None:
    for offset in (0, 5):
        freed = torch.ones(100)[offset:]
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="freed"):
            cpu_backend.norm([torch.ones(3), freed])
    assert cpu_backend.norm([]) == 0 == cpu_backend.norm([torch.empty(0)])


def test_compiled_code_checks_rows_too() -> None:
    @torch.compile(backend="eager")
    def cast(x: Tensor, row: Tensor) -> Tensor:
        return quantize_values(x, ONE, E4M3, row)

    with pytest.raises(ValueError, match="row must have shape"):
        cast(X, zeros(3))
