"""What the compiled kernels count, over several pieces and on vectors of any width: as it is defined."""

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import E4M3, E5M2, backends, measure, quantize_values
from fp8scope_kernels.formats import Format
from fp8scope_kernels.quantization import quantize_and_measure, quantize_now
from fp8scope_kernels.reference import Extent

ELEMENTS = 5 * 4096 + 77
"""Several pieces of any size that fits the first-level cache, and an odd rest."""


def values(kind: str, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(ELEMENTS, generator=draw)
    if kind == "small":
        x *= 10.0 ** -torch.randint(0, 12, (ELEMENTS,), generator=draw)
    if kind == "zero":
        x.zero_()
    if kind == "saturated here and there":
        x[torch.randint(ELEMENTS, (9,), generator=draw)] = 1e6
        x[-1] = -1e6
    if kind == "not finite here and there":
        x[::3001], x[1::5003], x[2] = torch.nan, -torch.inf, 1e6
    return x.to(dtype)


KINDS = ("usual", "small", "zero", "saturated here and there", "not finite here and there")


def by_definition(x: Tensor, scale: Tensor, format: Format) -> tuple[Tensor, list[float], Extent]:
    finite = torch.isfinite(x.float())
    scaled = x.float() * scale
    q = quantize_values(x, scale, format).float()
    amax = torch.where(finite, x.float().abs(), 0.0).amax()
    row = [
        float(x.numel()),
        amax.item(),
        scale.item(),
        float((finite & (scaled.abs() > format.limit)).sum()),
        float(((q == 0) & (x != 0)).sum()),
        float(((q != 0) & (q.abs() < format.smallest_normal)).sum()),
        float((~finite).sum()),
    ]
    return q, row, Extent(amax, (~finite).sum().double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_it_works(width: None, kind: str, dtype: torch.dtype, format: Format) -> None:
    x, scale = values(kind, dtype), torch.tensor(100.0)
    with pytest.MonkeyPatch.context() as reference:
        reference.setattr(backends, "_chosen", "reference")
        expected, counts, extent = by_definition(x, scale, format)
    assert format.dtype is not None
    for out in (torch.bfloat16, format.dtype):
        row = torch.zeros(7, dtype=torch.float64)
        q, seen = quantize_and_measure(out, x, scale, format, row)
        assert torch.equal(q.float().nan_to_num(7.5), expected.nan_to_num(7.5))
        assert row.tolist() == counts
        assert (seen.amax, seen.nonfinite) == (extent.amax, extent.nonfinite)
        # Of known extent, and where nobody asks for counts.
        row.zero_()
        known = quantize_now(out, x, scale, format, row, True, extent)
        assert torch.equal(known.float().nan_to_num(7.5), expected.nan_to_num(7.5))
        assert row.tolist() == counts
        _, uncounted = quantize_and_measure(out, x, scale, format, None)
        assert (uncounted.amax, uncounted.nonfinite) == (extent.amax, extent.nonfinite)


def test_a_row_of_another_kind_is_written_back(width: None) -> None:
    """What is not float64 side by side in memory."""
    x, scale = values("small", torch.float32), torch.tensor(100.0)
    _, counts, _ = by_definition(x, scale, E4M3)
    apart = torch.zeros(7, 2, dtype=torch.float64)
    quantize_and_measure(torch.bfloat16, x, scale, E4M3, apart[:, 1])
    assert apart[:, 1].tolist() == counts and not apart[:, 0].any()
    narrow = torch.zeros(7)
    quantize_and_measure(torch.bfloat16, x, scale, E4M3, narrow)
    assert narrow.tolist() == torch.tensor(counts).tolist()


def test_measuring_alone(width: None) -> None:
    for kind in KINDS:
        x = values(kind, torch.float32)
        _, _, extent = by_definition(x, torch.tensor(1.0), E4M3)
        seen = measure(x)
        assert (seen.amax, seen.nonfinite) == (extent.amax, extent.nonfinite)
