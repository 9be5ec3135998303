"""Rounding at random in Triton against the definition on the CPU: bit for bit, and count for count."""

import pytest
import torch
from kernels.helpers.values import all_bfloat16
from torch import Tensor

from fp8scope_kernels import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    STATISTICS,
    CurrentScaling,
    Format,
    Fp8Linear,
    RandomStream,
    measure,
    quantize,
    quantize_values,
    seed_rounding,
    set_backend,
)
from fp8scope_kernels.backends import use_triton
from fp8scope_kernels.recipes import Nonfinite

pytestmark = pytest.mark.gpu

SEED = 2**63 + 9


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, also in the sign of zeros. NaN need only be NaN: GPUs drop its sign."""
    actual, number = actual.cpu(), ~expected.float().isnan()
    assert torch.equal(~actual.float().isnan(), number)
    bits = {1: torch.uint8, 2: torch.int16}[expected.dtype.itemsize]
    assert torch.equal(actual.view(bits)[number], expected.view(bits)[number])


def run(
    backend: str, x: Tensor, scale: float, fmt: Format, nonfinite: Nonfinite, known: bool
) -> list[Tensor]:
    set_backend(backend)  # type: ignore[arg-type]
    stream = RandomStream(SEED, x.device)
    stream.state[1] = 2**32 - 1
    row, s = (
        torch.zeros(len(STATISTICS), dtype=torch.float64, device=x.device),
        torch.tensor(scale, device=x.device),
    )
    extent = measure(x) if known else None
    if fmt.dtype is None:
        results = [quantize_values(x, s, fmt, row, extent=extent, stochastic=stream, nonfinite=nonfinite)]
    else:
        results = [
            quantize(x, s, fmt, row, extent=extent, stochastic=stream, nonfinite=nonfinite).data,
            quantize_values(x[:9], s, fmt, stochastic=stream, nonfinite=nonfinite),
        ]
    return [*results, row, stream.state]


def assert_same(
    x: Tensor,
    device: torch.device,
    scale: float,
    fmt: Format,
    nonfinite: Nonfinite = "propagate",
    *,
    known: bool,
) -> None:
    actual = run("triton", x.to(device), scale, fmt, nonfinite, known)
    expected = run("reference", x, scale, fmt, nonfinite, known)
    for one, other in zip(actual[:-2], expected[:-2], strict=True):
        assert_same_bits(one, other)
    assert [one.tolist() for one in actual[-2:]] == [one.tolist() for one in expected[-2:]]


def test_it_works(device: torch.device) -> None:
    """2.1 lies between 2 and 2.25: two times in five it becomes the latter."""
    set_backend("triton")
    x = torch.full((10_000,), 2.1, device=device)
    assert use_triton(x, "quantize_at_random")
    q = quantize(x, torch.tensor(1.0, device=device), E4M3, stochastic=RandomStream(1, device)).data.float()
    assert set(q.tolist()) == {2.0, 2.25}
    assert q.mean().item() == pytest.approx(2.1, abs=0.01)


@pytest.mark.parametrize(
    ("fmt", "nonfinite"), [(E4M3, "clamp"), (E4M3FNUZ, "propagate")], ids=["clamped", "fnuz"]
)
def test_every_bfloat16(device: torch.device, fmt: Format, nonfinite: Nonfinite) -> None:
    assert_same(all_bfloat16(), device, 0.3, fmt, nonfinite, known=False)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
def test_other_shapes_and_scales(device: torch.device, fmt: Format) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 1367, generator=draw)
    x *= torch.exp2(torch.randint(-20, 20, x.shape, generator=draw).float())
    assert_same(x, device, 3.4028234663852886e38, fmt, known=True)
    assert_same(x[:, :50].half().t(), device, 7.0, fmt, known=False)


def test_a_layer(device: torch.device) -> None:
    gradients = []
    for backend, there in (("triton", device), ("reference", torch.device("cpu"))):
        set_backend(backend)  # type: ignore[arg-type]
        torch.manual_seed(1)
        layer = Fp8Linear(32, 32, bias=False, recipe=CurrentScaling(stochastic_gradients=True))
        seed_rounding(layer, 3)
        x = torch.randint(-3, 4, (64, 32), generator=torch.Generator().manual_seed(2)).float()
        g = torch.randint(-100, 101, (64, 32), generator=torch.Generator().manual_seed(4)).float()
        layer.to(there)(x.to(there)).backward(g.to(there))
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.cpu())
    torch.testing.assert_close(*gradients, rtol=2**-8, atol=0.0)
