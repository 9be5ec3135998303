"""Smooth-SwiGLU: the same function in high precision, and no flushed channels in FP8."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels import (
    STATISTICS,
    CurrentScaling,
    Fp8Linear,
    SmoothSwiGLU,
    StatisticsBuffer,
    convert,
    observe,
)
from fp8scope_kernels.smooth_swiglu import channel_scales


def block(*, outlier: float = 1.0) -> SmoothSwiGLU:
    """64 -> 128 -> 64; the first hidden channel is `outlier` times as large."""
    torch.manual_seed(0)
    gate, up, down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
    with torch.no_grad():
        up.weight[0] *= outlier
        up.bias[0] *= outlier
        down.weight[:, 0] /= outlier
    return SmoothSwiGLU(gate, up, down)


def plain(swiglu: SmoothSwiGLU, x: Tensor) -> Tensor:
    output: Tensor = swiglu.down(swiglu.up(x) * functional.silu(swiglu.gate(x)))
    return output


def test_it_works() -> None:
    """Output and all gradients are those of SwiGLU: powers of two change nothing but the sums' last bits."""
    swiglu, x = block().double(), torch.randn(3, 50, 64, dtype=torch.float64).requires_grad_()
    results = []
    for forward in (swiglu, lambda x: plain(swiglu, x)):
        output = forward(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), (x, *swiglu.parameters()))))
    for smooth, expected in zip(*results, strict=True):
        torch.testing.assert_close(smooth, expected, rtol=1e-13, atol=1e-13)


def test_scales_are_powers_of_two_of_each_channel() -> None:
    h = torch.tensor(
        [[1.0, -0.75, 0.0, 1e30, 3.0], [1.5, 0.1, 0.0, 1.0, torch.inf], [0.2, 0.0, 0.0, 2.0, torch.nan]]
    )
    assert channel_scales(h).tolist() == [1.0, 2.0, 1.0, 2.0**-60, 0.5]
    assert channel_scales(h[:0]).tolist() == [1.0] * 5
    smoothed = (h * channel_scales(h))[:, :3].abs().amax(0)
    assert smoothed.tolist() == [1.5, 1.5, 0.0]


def error(outlier: float, *, smooth: bool) -> tuple[float, float]:
    """The relative error of the output, and the share of the down projection's input that is flushed."""
    swiglu = block(outlier=outlier)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    exact = plain(swiglu, x)
    convert(swiglu, CurrentScaling(), include="down")
    buffer = StatisticsBuffer()
    observe(swiglu, buffer)
    output = swiglu(x) if smooth else plain(swiglu, x)
    rows = {info.name: row for info, row in zip(buffer.catalogue, buffer.data, strict=True)}
    flushed = rows["down.input"][STATISTICS.index("underflow")] / rows["down.input"][0]
    return ((output - exact).norm() / exact.norm()).item(), flushed.item()


def test_an_outlier_flushes_no_other_channel() -> None:
    """One channel is 10^6 times as large: with one scale for the tensor, FP8 loses the others."""
    swiglu_error, flushed = error(1e6, smooth=False)
    smooth_error, still_flushed = error(1e6, smooth=True)
    assert swiglu_error > 0.5 and flushed > 0.9
    assert smooth_error < 0.05 and still_flushed < 0.01


def test_converted_layers_train() -> None:
    swiglu = block(outlier=1e4)
    convert(swiglu, CurrentScaling())
    assert all(isinstance(layer, Fp8Linear) for layer in (swiglu.gate, swiglu.up, swiglu.down))
    x = torch.randn(32, 64).bfloat16()
    swiglu.bfloat16()(x).float().square().mean().backward()
    for parameter in swiglu.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="gate and up have 32 and 16 outputs, and down takes 32"):
        SmoothSwiGLU(nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(32, 16))
