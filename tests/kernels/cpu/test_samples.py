"""Samples by the compiled kernels against the definition in eager torch."""

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import E4M3, SAMPLE_SIZE, accumulate_sample, backends, quantize_values
from fp8scope_kernels.cpu import backend as cpu_backend

ROWS, COLUMNS = 37, 4096 + 333
"""Several of the kernels' pieces in a row, and no number of elements that any vector divides."""


def values(kind: str, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=draw)
    if kind == "every exponent":
        x *= torch.exp2(torch.randint(-149, 127, x.shape, generator=draw).double()).float()
        x[:, ::7] = torch.exp2(-torch.arange(126, 150).double()).float().repeat(30)[: x[:, ::7].shape[1]]
    if kind == "zeros":
        x[torch.rand(x.shape, generator=draw) < 0.5] = 0.0
        x[3] = -0.0
    if kind == "not finite":
        x[0, 0], x[1, -1], x[2, 2048] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def sampled(backend: str, *arguments: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_chosen", backend)
        sample = torch.zeros(SAMPLE_SIZE, dtype=torch.float64)
        for _ in range(2):
            accumulate_sample(sample, *arguments)
    return sample


def assert_alike(*arguments: Tensor) -> None:
    seen, expected = sampled("compiled", *arguments), sampled("reference", *arguments)
    assert torch.equal(seen[2:], expected[2:])
    # Float64 sums of up to 163,873 squares, in another order.
    torch.testing.assert_close(seen[:2], expected[:2], rtol=1e-12, atol=0.0)


@pytest.fixture
def calls(width: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that the compiled kernels are given."""
    seen: list[torch.Size] = []
    take = cpu_backend.accumulate_sample

    def watched(sample: Tensor, x: Tensor, q: Tensor, inverse_scale: Tensor) -> None:
        seen.append(x.shape)
        take(sample, x, q, inverse_scale)

    monkeypatch.setattr(cpu_backend, "accumulate_sample", watched)
    return seen


@pytest.mark.parametrize("kind", ["usual", "every exponent", "zeros", "not finite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_works(calls: list[torch.Size], kind: str, dtype: torch.dtype) -> None:
    x, scale = values(kind, dtype), torch.tensor(100.0)
    q = quantize_values(x, scale, E4M3).float()
    for held in (torch.bfloat16, torch.float8_e4m3fn):
        assert_alike(x, q.to(held), scale.reciprocal())
    # What overflows, where saturation is off: no part of the error.
    q[5, 5:900] = torch.inf
    assert_alike(x, q.bfloat16(), scale.reciprocal())
    assert len(calls) == 6


def test_a_scale_for_each_row(calls: list[torch.Size]) -> None:
    x = values("usual", torch.float32)
    scale = torch.exp2(torch.arange(ROWS) - 20.0).reshape(-1, 1)
    q = quantize_values(x * scale, torch.tensor(1.0), E4M3).bfloat16()
    assert_alike(x, q, scale.reciprocal())
    deep = x.reshape(ROWS, -1, 43)
    assert_alike(deep, q.reshape(deep.shape), scale.reciprocal().unsqueeze(-1))
    assert len(calls) == 4


def test_any_layout_and_more_elements_than_one_piece(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, scale = values("usual", torch.float32), torch.tensor(50.0)
    q = quantize_values(x, scale, E4M3).bfloat16()
    assert_alike(x.t(), q.t(), scale.reciprocal())
    assert_alike(x.reshape(-1), q.reshape(-1), scale.reciprocal())
    assert_alike(x[0, 0], q[0, 0], scale.reciprocal())
    monkeypatch.setattr("fp8scope_kernels.sampling.COMPILED_PART", 10 * COLUMNS)
    rows = torch.rand(ROWS, 1) + 1
    calls.clear()
    assert_alike(x, quantize_values(x * rows, torch.tensor(1.0), E4M3).bfloat16(), rows.reciprocal())
    assert [len(shape) and shape[0] for shape in calls] == [10, 10, 10, 7] * 2


def test_threads_do_not_change_samples(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "_threads", lambda x: 3)
    x, scale = values("every exponent", torch.float32), torch.tensor(1.0)
    q = quantize_values(x, scale, E4M3).bfloat16()
    assert_alike(x, q, scale.reciprocal())
    assert torch.equal(sampled("compiled", x, q, scale), sampled("compiled", x, q, scale))


def test_values_that_bfloat16_cannot_hold_use_torch(calls: list[torch.Size]) -> None:
    x, scale = values("usual", torch.float32), torch.tensor(100.0)
    q = quantize_values(x, scale, E4M3)
    for arguments in (
        (x, q.float() + 1e-3, scale),
        (x.double(), q.bfloat16(), scale),
        (x, q.bfloat16(), scale.double()),
        (x, q.bfloat16(), torch.rand(1, COLUMNS)),
        (torch.empty(0, 4), torch.empty(0, 4).bfloat16(), scale),
    ):
        assert_alike(*arguments)
    assert calls == []
