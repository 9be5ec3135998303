"""Quantisation in code that torch.compile traces: operators without graph breaks.

The `aot_eager` backend traces, functionalises and partitions as the default one does, without a C++ compiler.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    E4M3,
    E5M2,
    STATISTICS,
    Format,
    amax_to_scale,
    measure,
    quantize,
    quantize_values,
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def scale_and_quantize(x: Tensor, row: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    extent = measure(x)
    scale = amax_to_scale(extent.amax, format, margin=-1)
    data = quantize(x, scale, format, row, extent=extent).data
    return data, quantize_values(x, scale, format, row, extent=extent), scale


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_it_works(fmt: Format) -> None:
    """In one graph, with the same result; margin -1 makes half of the range saturate."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    x[3, 4], x[5, 6] = torch.nan, -torch.inf
    rows = torch.zeros(2, len(STATISTICS), dtype=torch.float64)
    compiled = torch.compile(scale_and_quantize, backend="aot_eager", fullgraph=True)
    expected, actual = scale_and_quantize(x, rows[0], fmt), compiled(x, rows[1], fmt)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.float().nan_to_num(-7.0), other.float().nan_to_num(-7.0))
    assert torch.equal(rows[0], rows[1])
    assert rows[0, STATISTICS.index("saturated")] > 0
    assert rows[0, STATISTICS.index("nonfinite")] == 4


def test_the_operators_are_registered_properly() -> None:
    x, scale = torch.randn(8, 4), torch.tensor(2.0)
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    extent = [part.clone() for part in torch.ops.fp8scope.measure(x)]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fp8scope.measure.default, (x,), test_utils=tests)
    for statistics in (row, None):
        torch.library.opcheck(
            torch.ops.fp8scope.quantize.default,
            (x, scale, "E4M3", torch.float8_e4m3fn, statistics, True, *extent),
            test_utils=tests,
        )


def test_a_custom_format_is_refused() -> None:
    own = dataclasses.replace(E4M3, bias=8)
    compiled = torch.compile(
        lambda x: quantize_values(x, torch.ones(()), own), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="Compiled code supports the formats"):
        compiled(torch.ones(4))


def test_the_result_has_no_gradient_in_compiled_code_either() -> None:
    x = torch.randn(8, 16).requires_grad_()

    def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return quantize_values(x, torch.tensor(2.0), E4M3), measure(x).amax, (3 * x).sum()

    for call in (quantized, torch.compile(quantized, backend="aot_eager", fullgraph=True)):
        q, amax, loss = call(x)
        assert not q.requires_grad and not amax.requires_grad
        x.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3.0))
