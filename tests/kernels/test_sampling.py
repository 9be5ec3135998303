"""Samples: quantisation error and the histogram of exponents."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_kernels import (
    E4M3,
    EXPONENT_BINS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    MXFP8,
    SAMPLE_SIZE,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    accumulate_sample,
    exponent_bin,
    exponent_histogram,
    observe,
    quantize,
)


def test_it_works() -> None:
    histogram = exponent_histogram(torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0, 0.4, torch.nan, -torch.inf]))
    assert histogram.shape == (EXPONENT_BINS,)
    counts = {0: histogram[0].item(), -1: histogram[-1].item()}
    assert counts == {0: 2.0, -1: 2.0}
    assert [histogram[exponent_bin(e)].item() for e in (-2, -1, 0, 1, 2)] == [1.0, 0.0, 2.0, 1.0, 0.0]
    assert histogram.sum() == 8


@given(st.lists(st.floats(width=32), max_size=60))
def test_every_float32_has_its_bin(values: list[float]) -> None:
    expected = [0.0] * EXPONENT_BINS
    for value in values:
        if value == 0:
            expected[0] += 1
        elif not math.isfinite(value):
            expected[-1] += 1
        else:
            expected[exponent_bin(math.frexp(value)[1] - 1)] += 1
    assert exponent_histogram(torch.tensor(values, dtype=torch.float32)).tolist() == expected


def test_the_ends_of_float32() -> None:
    ends = torch.tensor([2.0**MIN_EXPONENT, torch.finfo(torch.float32).max])
    histogram = exponent_histogram(ends)
    assert histogram[[1, -2]].tolist() == [1.0, 1.0]
    assert (exponent_bin(MIN_EXPONENT), exponent_bin(MAX_EXPONENT)) == (1, EXPONENT_BINS - 2)
    for beyond in (MIN_EXPONENT - 1, MAX_EXPONENT + 1):
        with pytest.raises(ValueError, match="exponents -149 to 127"):
            exponent_bin(beyond)


def test_an_empty_tensor() -> None:
    assert exponent_histogram(torch.empty(0, 3)).sum() == 0


def test_error_and_signal() -> None:
    x = torch.tensor([1.0, 1.03, torch.nan, 1000.0])
    scale = torch.tensor(1.0)
    q = quantize(x, scale, E4M3)
    sample = torch.zeros(SAMPLE_SIZE, dtype=torch.float64)
    for _ in range(2):
        accumulate_sample(sample, x, q.data, q.inverse_scale)
    wide = x.double()
    assert sample[0].item() == pytest.approx(
        2 * ((wide[1] - 1) ** 2 + (1000.0 - 448.0) ** 2).item(), rel=1e-12
    )
    assert sample[1].item() == pytest.approx(2 * wide[[0, 1, 3]].square().sum().item(), rel=1e-12)
    assert sample[2:].sum() == 8


@pytest.mark.parametrize("recipe", [DelayedScaling(), RowwiseScaling(), MXFP8()], ids=lambda r: r.kind)
def test_a_layer_samples_only_when_asked(recipe: Recipe) -> None:
    torch.manual_seed(0)
    layer, buffer = Fp8Linear(64, 32, recipe=recipe), StatisticsBuffer(capacity=2)
    observe(layer, buffer)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()
    assert buffer.sample_data is None
    buffer.sampling = True
    layer(x).square().sum().backward()
    buffer.sampling = False
    layer(x).square().sum().backward()
    samples = buffer.sample_data
    assert samples is not None
    assert samples[:, 2:].sum(1).tolist() == [16 * 64, 32 * 64, 16 * 32]
    assert torch.equal(samples[0, 2:], exponent_histogram(x))
    # E4M3 gives about 31 dB on Gaussian data, E5M2 about 25.
    decibels = 10 * torch.log10(samples[:, 1] / samples[:, 0])
    assert ((decibels > 24) & (decibels < 34)).all()
    buffer.zero_()
    assert torch.count_nonzero(samples) == 0


def test_growing_keeps_samples() -> None:
    buffer = StatisticsBuffer(capacity=1)
    slot = buffer.register("a.input", format=E4M3, shape=(-1, 4), role="input")
    assert slot.sample_row is None
    buffer.sampling = True
    assert slot.sample_row is not None
    slot.sample_row[0] = 5.0
    buffer.register("b.input", format=E4M3, shape=(-1, 4), role="input")
    assert buffer.sample_data is not None
    assert buffer.sample_data[:, 0].tolist() == [5.0, 0.0]
