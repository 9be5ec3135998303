"""Products of quantised operands, on the FP8 operator and on BF16 values alike."""

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import E4M3, E5M2, Format, backends, matmul, measure, set_backend
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.matmul import (
    Operand,
    can_multiply,
    multiply,
    to_operand,
)
from fp8scope_kernels.torch_internals import has_bf16_units
from fp8scope_kernels.unit_products import has_fp8_units

FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["values", "bytes"])


def operand(x: Tensor, scale: float, fmt: Format, fp8: bool) -> Operand:
    return to_operand(x, torch.tensor(scale), fmt, None, saturate=True, extent=measure(x), fp8=fp8)


def exact(a: Operand, b: Operand) -> Tensor:
    left, right = (o.values.double() * o.inverse_scale.double() for o in (a, b))
    return left @ right


def matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@FP8
def test_it_works(fp8: bool) -> None:
    a = operand(matrix(32, 64, seed=1), 100.0, E4M3, fp8)
    b = operand(matrix(48, 64, seed=2), 70.0, E4M3, fp8)
    assert a.values.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
    result = multiply(a, b.t(), torch.float32)
    expected = exact(a, b.t())
    # BF16 keeps 8 bits: half a unit in the last place, plus float32's rounding of the sum.
    error = (result - expected).abs()
    assert result.dtype == torch.float32
    assert (error <= expected.abs() * 2**-8 + expected.abs().max() * 2**-20).all()


@FP8
@pytest.mark.parametrize("tokens", [1, 5, 16, 33])
def test_pads_sizes_that_fp8_units_do_not_support(fp8: bool, tokens: int) -> None:
    """wgrad's inner size is the number of tokens, which is anything."""
    g = operand(matrix(tokens, 32, seed=3), 9.0, E5M2, fp8)
    x = operand(matrix(tokens, 16, seed=4), 50.0, E4M3, fp8)
    result = multiply(g.t(), x, torch.float32)
    expected = exact(g.t(), x)
    assert result.shape == (32, 16)
    assert ((result - expected).abs() <= expected.abs() * 2**-8 + expected.abs().max() * 2**-20).all()


@FP8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_dtype(fp8: bool, dtype: torch.dtype) -> None:
    a = operand(matrix(16, 16, seed=5), 10.0, E4M3, fp8)
    assert multiply(a, a, dtype).dtype == dtype


def test_operands_are_exact_whatever_the_scale() -> None:
    """Three is no power of two; the values are exact in BF16 because the scale is not in them."""
    x = matrix(64, 64, seed=6)
    as_bytes, as_values = operand(x, 3.0, E4M3, True), operand(x, 3.0, E4M3, False)
    assert torch.equal(as_bytes.values.float(), as_values.values.float())
    assert torch.equal(as_bytes.inverse_scale, as_values.inverse_scale)


def test_which_formats_the_units_multiply() -> None:
    assert can_multiply(E4M3, E4M3)
    assert can_multiply(E4M3, E5M2)
    assert can_multiply(E5M2, E4M3)
    assert not can_multiply(E5M2, E5M2)


def test_a_cpu_has_no_fp8_units() -> None:
    assert not has_fp8_units(torch.device("cpu"))


# --- CPUs with and without BF16 units -------------------------------------------------------------------

UNITS = pytest.mark.parametrize("units", [False, True], ids=["float32", "bf16"])


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the operands that torch multiplies, as it does."""
    seen: list[torch.dtype] = []
    mm = torch.mm

    def noting(a: Tensor, b: Tensor) -> Tensor:
        seen.append(a.dtype)
        assert not torch.is_autocast_enabled("cpu")
        return mm(a, b)

    monkeypatch.setattr(torch, "mm", noting)
    return seen


@UNITS
@pytest.mark.parametrize("autocast", [False, True])
def test_operands_have_the_dtype_that_the_cpu_multiplies(
    units: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch, products: list[torch.dtype]
) -> None:
    monkeypatch.setattr(matmul, "has_bf16_units", lambda: units)
    a, b = operand(matrix(8, 48, seed=1), 9.0, E4M3, False), operand(matrix(16, 48, seed=2), 7.0, E5M2, False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = multiply(a, b.t(), torch.bfloat16)
    assert products == [torch.bfloat16 if units else torch.float32]
    assert result.dtype == torch.bfloat16


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("left", "right"), [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (40, 64, 24), (33, 200, 65)])
def test_fp8_and_bf16_products_give_the_same_bits(
    shape: tuple[int, int, int],
    left: Format,
    right: Format,
    out_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums that float32 holds whatever their order, among them many that BF16 has to round."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-7, 8, (rows, inner), generator=generator).float()
    b = torch.randint(-7, 8, (inner, columns), generator=generator).float() * 16
    exact_sum = a.double() @ b.double()
    operands = operand(a, 1.0, left, False), operand(b, 1.0, right, False)
    inverse = torch.tensor(1 / 3)
    results = []
    for units in (False, True):
        monkeypatch.setattr(matmul, "has_bf16_units", lambda units=units: units)
        results.append(multiply(operands[0], Operand(operands[1].values, inverse), out_dtype))
    assert torch.equal(*results)
    if E5M2 not in (left, right):  # which holds no 7
        assert torch.equal(results[0], (exact_sum.bfloat16().float() * inverse).to(out_dtype))


def test_large_sums_differ_by_their_order_only(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (
        operand(matrix(64, 512, seed=1), 90.0, E4M3, False),
        operand(matrix(64, 512, seed=2), 9.0, E5M2, False),
    )
    expected = exact(a, b.t())
    for units in (False, True):
        monkeypatch.setattr(matmul, "has_bf16_units", lambda units=units: units)
        error = (multiply(a, b.t(), torch.float32) - expected).abs()
        assert (error <= expected.abs() * 2**-8 + expected.abs().max() * 2**-20).all()


@pytest.mark.parametrize(
    ("machine", "flags", "onednn", "expected"),
    [
        ("x86_64", {"_is_avx512_bf16_supported"}, True, True),
        ("AMD64", {"_is_amx_tile_supported"}, True, True),
        ("x86_64", set(), True, False),
        ("x86_64", None, True, False),
        ("x86_64", {"_is_avx512_bf16_supported"}, False, False),
    ],
)
def test_which_cpus_have_units(
    machine: str, flags: set[str] | None, onednn: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what torch says of the CPU; where it says nothing, float32 is right."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if flags is None:
            monkeypatch.delattr(torch.cpu, name, raising=False)
        else:
            monkeypatch.setattr(torch.cpu, name, lambda name=name: name in flags, raising=False)
    assert has_bf16_units.__wrapped__() is expected


# --- scaling the product --------------------------------------------------------------------------------


def awkward(*shape: int) -> Tensor:
    """Products of every size, as BF16, with what has no size among them."""
    x = matrix(*shape, seed=3) * torch.exp2(torch.randint(-60, 60, shape).float())
    x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    return x.bfloat16()


@pytest.mark.parametrize("inverse", [1 / 3, 2.0**-100, 1.1754944e-38, 3e38, 1.0])
def test_a_scaled_product_is_rounded_once(inverse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 times a float32 scale: in float32, whatever shortcut is taken."""
    product = awkward(33, 65)
    monkeypatch.setattr(torch, "mm", lambda a, b: product.clone())
    scale = torch.tensor(inverse)
    a, b = Operand(product, scale), Operand(product.t(), torch.tensor(1.5))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        expected = (product.float() * (scale * 1.5)).to(dtype)
        assert torch.equal(multiply(a, b, dtype).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 65), (1, 4), (4, 1), (300, 500)])
def test_scales_by_rows_are_applied_natively(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, left, right = (
        awkward(*shape),
        matrix(shape[0], 1, seed=5).abs(),
        matrix(1, shape[1], seed=6).abs(),
    )
    expected = product.float().mul(left).mul(right).to(dtype)
    actual = cpu_backend.scale_product(product, left, right, dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
    # A transposed product, as torch may return one, and a view of the scales.
    turned = cpu_backend.scale_product(product.t(), right.t(), left.t(), dtype)
    assert torch.equal(
        turned.nan_to_num(7.0), product.t().float().mul(right.t()).mul(left.t()).to(dtype).nan_to_num(7.0)
    )
    monkeypatch.setattr(backends, "_chosen", "auto")
    monkeypatch.setattr(torch, "mm", lambda a, b: product.clone())
    for backend in ("compiled", "reference"):
        set_backend(backend)
        result = multiply(Operand(product, left), Operand(product.t(), right), dtype)
        assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0))
