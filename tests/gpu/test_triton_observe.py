"""The Triton kernel's counters of a plain tensor against torch on the CPU."""

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import STATISTICS, StatisticsBuffer, set_backend
from fp8scope_kernels.high_precision import add_tensor
from fp8scope_kernels.triton import backend as triton_backend

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def expected(x: Tensor) -> list[float]:
    wide = x.cpu().float()
    finite = wide[torch.isfinite(wide)].abs().double()
    return [
        x.numel(),
        float(finite.max()) if finite.numel() else 0.0,
        1,
        0,
        0,
        0,
        int((~wide.isfinite()).sum()),
    ]


def counted(*tensors: Tensor) -> list[float]:
    buffer = StatisticsBuffer(2, tensors[0].device)
    slot = buffer.register("x", format=None, shape=(-1,), role="input")
    for x in tensors:
        add_tensor(slot, x)
    assert not buffer.storage[1:].any()
    row: list[float] = slot.row.tolist()
    return row


def test_it_works(device: torch.device) -> None:
    set_backend("triton")
    x = torch.randn(3, 5, device=device)
    assert counted(x) == expected(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda x: x, id="contiguous"),
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[::2, 1:], id="sliced"),
        pytest.param(lambda x: x[:1].expand(5, -1), id="expanded"),
        pytest.param(lambda x: x[:0], id="empty"),
        pytest.param(lambda x: x[0, 0], id="one element"),
    ],
)
@pytest.mark.parametrize("poisoned", [False, True])
def test_every_layout(device: torch.device, dtype: torch.dtype, layout: object, poisoned: bool) -> None:
    assert callable(layout)
    set_backend("triton")
    x = torch.randn(33, 301, generator=torch.Generator().manual_seed(5)).to(dtype)
    if poisoned:
        x.view(-1)[[0, 17, 5000]] = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype)
    view: Tensor = layout(x.to(device))
    assert counted(view) == expected(view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern(device: torch.device, dtype: torch.dtype) -> None:
    set_backend("triton")
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    assert counted(patterns) == expected(patterns)


def test_calls_add_up(device: torch.device) -> None:
    set_backend("triton")
    parts = [torch.full((3,), -5.0), torch.ones(9000), torch.tensor([torch.nan, 2.0])]
    assert counted(*(part.to(device) for part in parts)) == [9005, 5, 1, 0, 0, 0, 1]


def test_a_row_elsewhere_is_refused(device: torch.device) -> None:
    row = torch.zeros(len(STATISTICS), dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="contiguous float64 row"):
        triton_backend.observe(torch.ones(4, device=device), row)
