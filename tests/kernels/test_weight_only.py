"""INT8, INT4, NVFP4 and FP6 weights against their definitions, computed in float64 by brute force."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    E2M1,
    E3M2,
    E4M3,
    Format,
    quantize_fp6,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)
from fp8scope_kernels.weight_only import pack_nibbles, unpack_nibbles

Doubles = npt.NDArray[np.float64]
SMALLEST = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
QUANTIZERS: dict[str, Callable[[Tensor], Any]] = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "nvfp4": quantize_nvfp4,
    "fp6": quantize_fp6,
}


def f32(x: Any) -> Doubles:
    """Round float64 to float32. A quotient or product of two float32 is rounded as float32 would."""
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def nearest(x: Doubles, format: Format) -> Doubles:
    """The nearest of the finite values of a format by their distances; of two, that with an even code."""
    codes = [code for code in range(1 << (format.bits - 1)) if np.isfinite(format.decode(code))]
    values = np.array([format.decode(code) for code in codes])
    distances = np.abs(np.abs(x)[..., None] - values)
    candidates = distances == distances.min(-1, keepdims=True)
    odd = np.array([code % 2 for code in codes])
    chosen = np.where(candidates, odd, 2).argmin(-1)
    result: Doubles = np.copysign(values[chosen], x)
    return result


def by_groups(x: Doubles, size: int, values_of: Callable[[Doubles], Doubles]) -> Doubles:
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            out[row, start : start + size] = values_of(x[row, start : start + size])
    return out


def integers(top: float) -> Callable[[Doubles], Doubles]:
    def values_of(group: Doubles) -> Doubles:
        scale = np.maximum(f32(np.abs(group).max() / top), SMALLEST)
        return f32(np.rint(f32(group / scale)) * scale)

    return values_of


def fp6(row: Doubles) -> Doubles:
    amax = np.abs(row).max()
    # 28 / amax of the smallest numbers is more than float32 holds.
    scale = 1.0 if amax == 0.0 else np.clip(f32(min(28.0 / amax, LARGEST)), SMALLEST, LARGEST)
    return f32(nearest(np.clip(f32(row * scale), -28.0, 28.0), E3M2) * f32(1.0 / scale))


def nvfp4(x: Doubles) -> Doubles:
    tensor_scale = np.maximum(f32(np.abs(x).max() / 2688.0), SMALLEST)

    def values_of(block: Doubles) -> Doubles:
        ideal = f32(f32(np.abs(block).max() / 6.0) / tensor_scale)
        scale = f32(nearest(np.minimum(ideal, 448.0), E4M3) * tensor_scale)
        if scale == 0.0:
            return np.zeros_like(block)
        return f32(nearest(np.clip(f32(block / scale), -6.0, 6.0), E2M1) * scale)

    return by_groups(x, 16, values_of)


REFERENCES: dict[str, Callable[[Doubles], Doubles]] = {
    "int8": lambda x: by_groups(x, max(x.shape[1], 1), integers(127.0)),
    "int4": lambda x: by_groups(x, 128, integers(7.0)),
    "nvfp4": nvfp4,
    "fp6": lambda x: by_groups(x, max(x.shape[1], 1), fp6),
}


def matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # Scales of 1: every multiple of a sixteenth, and with them all ties.
    ties = (torch.arange(-96, 97) / 16.0).reshape(1, -1)
    return {
        "normal": normal(8, 300) * torch.rand(8, 1, generator=generator),
        "bfloat16": normal(4, 144).bfloat16(),
        "float64": normal(3, 40).double(),
        "many orders": normal(6, 256) * 2.0 ** (60 * normal(6, 256)).clamp(-120, 120),
        "ties of int8": torch.cat((torch.arange(-254, 255) / 2.0, torch.tensor([127.0]))).reshape(1, -1),
        "ties of int4": torch.cat((torch.arange(-56, 57) / 8.0, torch.full((15,), 7.0))).reshape(1, -1),
        # Blocks of 16 that hold 6, beside one that holds 6 * 448: both scales of every block but that are 1.
        "ties of nvfp4": torch.cat(
            [torch.cat((ties.flatten()[i : i + 15], torch.tensor([6.0]))) for i in range(0, 180, 15)]
            + [torch.tensor([2688.0]), torch.zeros(15)]
        ).reshape(1, -1),
        # Scales of blocks between two values of E4M3, subnormal ones and 0 too.
        "ties of block scales": (torch.arange(0, 64 * 16) // 16 * 6 / 1024.0).reshape(1, -1) * torch.ones(1)
        + torch.nn.functional.pad(torch.tensor([[2688.0]]), (0, 64 * 16 - 1)),
        "zeros": torch.zeros(3, 33),
        "subnormals": normal(4, 64) * 2.0**-135,
        "smallest": torch.full((2, 17), 2.0**-149),
        "largest": normal(2, 32).sign() * (torch.finfo(torch.float32).max / 2),
        "one column": normal(5, 1),
        "negative zero": torch.tensor([[-0.0, 1.0, -1e-9]]),
    }


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_value_is_that_of_the_definition(name: str) -> None:
    for kind, weight in matrices().items():
        expected = torch.from_numpy(REFERENCES[name](weight.double().numpy()))
        values = QUANTIZERS[name](weight).dequantize().double()
        assert torch.equal(values, expected), f"{kind}: {(values != expected).sum()} differ"


@pytest.mark.parametrize("negative", [False, True])
def test_every_bfloat16_between_the_smallest_and_largest_code(negative: bool) -> None:
    """All values up to 6 of each sign, beside elements that make each scale 1."""
    every = torch.arange(0, 0x40C1, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = (-every if negative else every).float()
    padded = torch.nn.functional.pad(every, (0, -len(every) % 15)).reshape(-1, 15)
    blocks = torch.cat((padded, torch.full((len(padded), 1), 6.0)), 1).flatten()
    weight = torch.cat((torch.tensor([2688.0]), torch.zeros(15), blocks)).reshape(1, -1)
    values = quantize_nvfp4(weight).dequantize().double().numpy()[0, 16:]
    assert (values == nearest(blocks.double().numpy(), E2M1)).all()
    for quantizer, top in ((quantize_int8, 127.0), (quantize_int4, 7.0)):
        row = torch.cat((torch.full((1, 1), top), every.reshape(1, -1)), 1)
        if quantizer is quantize_int4:
            row = torch.cat((torch.full((len(padded), 1), top), padded), 1)
        integers_of = quantizer(row).dequantize()
        assert torch.equal(integers_of, row.round())


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4), ("nvfp4", 4)])
def test_bytes_are_those_of_codes_and_scales(name: str, bits: int) -> None:
    packed = QUANTIZERS[name](torch.ones(32, 256))
    scales = {"int8": 32 * 4, "int4": 32 * 2 * 4, "nvfp4": 32 * 16 + 4}[name]
    assert packed.nbytes == 32 * 256 * bits // 8 + scales
    assert packed.nbytes == sum(part.nbytes for part in packed if isinstance(part, Tensor))


def test_every_pair_of_nibbles_survives_packing() -> None:
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), 2), codes)
    odd = codes.reshape(2, -1)[:, :201]
    assert torch.equal(unpack_nibbles(pack_nibbles(odd), 201), odd)
    with pytest.raises(ValueError, match="3 codes take 2 bytes"):
        unpack_nibbles(pack_nibbles(codes), 3)


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_what_no_format_holds_is_refused(quantizer: Callable[[Tensor], Any]) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ValueError, match="NaN or Inf"):
            quantizer(torch.tensor([[1.0, value]]))
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        quantizer(torch.ones(2, 3, 4))
    with pytest.raises(TypeError, match="int64"):
        quantizer(torch.ones(2, 3, dtype=torch.int64))
    assert quantizer(torch.ones(0, 16)).dequantize().shape == (0, 16)
