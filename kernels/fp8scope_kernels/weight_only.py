"""Weights in INT8, INT4 and NVFP4, for evaluation. FP6 has a module of its own (`fp6`).

A matrix [rows, columns], as `nn.Linear` has it, is quantised without data, from its own largest elements.
`f32` is the rounding to float32 and `even` the rounding to the nearest integer or value, ties to even. T is
2^-126, the smallest normal float32: smaller scales become T, so that no division overflows.

    INT8    one scale per row: s = max(f32(amax / 127), T), code = even(f32(x / s)), -127 to 127
    INT4    one scale per 128 elements of a row: s = max(f32(amax / 7), T), code = even(f32(x / s)), -7 to 7
    NVFP4   E2M1 codes with one E4M3 scale b per 16 elements of a row and one float32 scale t of the tensor:
            t = max(f32(amax of the tensor / 2688), T), 2688 = 6 * 448, as in training (recipe `NVFP4`)
            b = even in E4M3 of min(f32(f32(amax / 6) / t), 448)
            d = f32(b * t), code = even in E2M1 of f32(x / d) clamped to -6 to 6; 0 where d is 0

The values are f32(code * s) and f32(code * d). A last group or block of a row may be shorter. Two codes of
four bits share a byte, the first in the lower half; a row of an odd number of them ends with a code of 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels.formats import E2M1
from fp8scope_kernels.reference import (
    amax_to_nvfp4_block_scale,
    amax_to_nvfp4_tensor_scale,
    round_to_format,
)

INT4_GROUP = 128
NVFP4_BLOCK = 16
MIN_SCALE = 2.0**-126


class Int8Weight(NamedTuple):
    """`codes`: int8 [rows, columns]. `scale`: float32 [rows, 1]."""

    codes: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, computed in float32 and rounded once to `dtype`."""
        return self.codes.float().mul_(self.scale).to(dtype)


class Int4Weight(NamedTuple):
    """`codes`: uint8 [rows, columns/2], two's complement. `scale`: float32 [rows, groups]."""

    codes: Tensor
    scale: Tensor
    columns: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, computed in float32 and rounded once to `dtype`."""
        nibbles = unpack_nibbles(self.codes, self.columns)
        # Bit 3 is the sign of two's complement.
        values = ((nibbles ^ 8).to(torch.int8) - 8).float()
        return _scaled(values, self.scale, INT4_GROUP).to(dtype)


class Nvfp4Weight(NamedTuple):
    """`codes`: uint8 [rows, columns/2], E2M1. `block_scale`: E4M3 [rows, blocks]. `tensor_scale`: float32."""

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor
    columns: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.block_scale.nbytes + self.tensor_scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, computed in float32 and rounded once to `dtype`."""
        values = E2M1.table.to(self.codes.device)[unpack_nibbles(self.codes, self.columns).int()]
        return _scaled(values, self.block_scale.float() * self.tensor_scale, NVFP4_BLOCK).to(dtype)


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Quantise `weight` [rows, columns], any floating dtype; see the module.

    Raises TypeError for integers, and ValueError unless `weight` is a matrix of finite elements.
    """
    x = _checked(weight)
    scale = _amax(x, max(x.shape[1], 1)).div_(127.0).clamp_(min=MIN_SCALE)
    return Int8Weight((x / scale).round_().to(torch.int8), scale)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Quantise `weight` [rows, columns], any floating dtype. Raises as `quantize_int8` does."""
    x = _checked(weight)
    scale = _amax(x, INT4_GROUP).div_(7.0).clamp_(min=MIN_SCALE)
    codes = _divided(x, scale, INT4_GROUP).round_().to(torch.int8)
    return Int4Weight(pack_nibbles((codes & 0xF).to(torch.uint8)), scale, x.shape[1])


def quantize_nvfp4(weight: Tensor) -> Nvfp4Weight:
    """Quantise `weight` [rows, columns], any floating dtype. Raises as `quantize_int8` does."""
    x = _checked(weight)
    amax = _amax(x, NVFP4_BLOCK)
    largest = amax.max() if amax.numel() else amax.new_zeros(())
    tensor_scale = amax_to_nvfp4_tensor_scale(largest)
    block_scale = amax_to_nvfp4_block_scale(amax, tensor_scale)
    scaled = _divided(x, block_scale * tensor_scale, NVFP4_BLOCK)
    # Of a block whose scale is 0: 0 / 0, and small elements / 0.
    scaled = torch.where(scaled.isfinite(), scaled, 0.0)
    values = round_to_format(scaled.clamp_(-E2M1.max, E2M1.max), E2M1)
    codes = pack_nibbles(_encode_e2m1(values))
    return Nvfp4Weight(codes, block_scale.to(torch.float8_e4m3fn), tensor_scale, x.shape[1])


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes, uint8 [rows, columns] below 16, to a byte: uint8 [rows, (columns + 1) // 2]."""
    padded = functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, 0::2] | padded[:, 1::2] << 4


def unpack_nibbles(packed: Tensor, columns: int) -> Tensor:
    """The codes that `pack_nibbles` packed: uint8 [rows, columns].

    Raises ValueError if `columns` codes do not fill the rows.
    """
    if packed.dim() != 2 or packed.shape[1] != (columns + 1) // 2:
        raise ValueError(
            f"{columns} codes take {(columns + 1) // 2} bytes a row, got shape {tuple(packed.shape)}."
        )
    return torch.stack((packed & 0xF, packed >> 4), 2).flatten(1)[:, :columns]


def _encode_e2m1(values: Tensor) -> Tensor:
    """The codes of values of E2M1, uint8. -0 becomes +0."""
    sign = 1 << (E2M1.bits - 1)
    codes = torch.bucketize(values.abs(), E2M1.table[:sign].to(values.device), out_int32=True)
    return torch.where(values < 0, codes + sign, codes).to(torch.uint8)


def _checked(weight: Tensor) -> Tensor:
    """The matrix in float32."""
    if not weight.is_floating_point():
        raise TypeError(f"Only floating-point weights can be quantised, got {weight.dtype}.")
    if weight.dim() != 2:
        raise ValueError(f"Only matrices can be quantised, got shape {tuple(weight.shape)}.")
    x = weight.detach().float()
    if not torch.isfinite(x).all():
        raise ValueError("The weight has NaN or Inf elements, which the format cannot hold.")
    return x


def _grouped(x: Tensor, size: int) -> Tensor:
    """[rows, columns] -> [rows, groups, size], with zeros behind the last column."""
    padded = functional.pad(x, (0, -x.shape[1] % size))
    return padded.reshape(x.shape[0], padded.shape[1] // size, size)


def _amax(x: Tensor, size: int) -> Tensor:
    """The largest absolute value of each `size` elements of a row: [rows, groups]."""
    return _grouped(x, size).abs().amax(2)


def _divided(x: Tensor, scale: Tensor, size: int) -> Tensor:
    return (_grouped(x, size) / scale.unsqueeze(2)).flatten(1)[:, : x.shape[1]]


def _scaled(values: Tensor, scale: Tensor, size: int) -> Tensor:
    columns = values.shape[1]
    return (_grouped(values, size) * scale.unsqueeze(2)).flatten(1)[:, :columns]
