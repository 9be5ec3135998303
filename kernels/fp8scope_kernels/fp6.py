"""Weights in FP6 (E3M2) with one scale per row, stored in 6 bits each, for evaluation.

Six bits do not divide a byte. As in Xia et al., "FP6-LLM" (2024), each code is therefore split into its upper
2 and its lower 4 bits, each of which packs evenly:

    code    s e e e m m     sign, exponent, mantissa
    two     s e             4 to a byte
    four    e e m m         2 to a byte

A row of n codes, padded to a multiple of 16 so that both parts are whole 32-bit words, is laid out in planes:
byte j of `four` holds the codes j and j + n/2, byte j of `two` the codes j, j + n/4, j + n/2 and j + 3n/4,
lowest bits first. Unpacking is then a few masks and shifts over contiguous memory, without a gather.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels.block_quantization import quantize_blocks
from fp8scope_kernels.formats import E3M2
from fp8scope_kernels.recipes import RowwiseScaling

GROUP = 16
"""Rows are padded to a multiple of this many codes."""

SIGN = 1 << 5


class Fp6Weight(NamedTuple):
    """A matrix [rows, columns] in 6 bits per element.

    `two`: uint8 [rows, padded/4]. `four`: uint8 [rows, padded/2]. `inverse_scale`: float32 [rows, 1].
    """

    two: Tensor
    four: Tensor
    inverse_scale: Tensor
    columns: int

    @property
    def nbytes(self) -> int:
        return self.two.nbytes + self.four.nbytes + self.inverse_scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, computed in float32 and rounded once to `dtype`."""
        values = decode_fp6(unpack_fp6(self.two, self.four, self.columns))
        return values.mul_(self.inverse_scale).to(dtype)


def quantize_fp6(weight: Tensor, row: Tensor | None = None, block_row: Tensor | None = None) -> Fp6Weight:
    """Quantise `weight` [rows, columns], any floating dtype, to E3M2 with s = 28 / amax of each row.

    `row` and `block_row` take statistics, see `StatisticsBuffer`. Raises ValueError unless `weight` is a
    matrix of finite elements (E3M2 has neither NaN nor Inf), and TypeError for integers.
    """
    if weight.dim() != 2:
        raise ValueError(f"Only matrices can be quantised per row, got shape {tuple(weight.shape)}.")
    if not weight.is_floating_point():
        raise TypeError(f"Only floating-point weights can be quantised, got {weight.dtype}.")
    if not torch.isfinite(weight).all():
        raise ValueError("The weight has NaN or Inf elements, which E3M2 cannot hold.")
    quantized = quantize_blocks(weight, E3M2, (1, 0), RowwiseScaling(), row, block_row)
    two, four = pack_fp6(encode_fp6(quantized.values))
    inverse = quantized.scale.reciprocal().reshape(-1, 1).expand(weight.shape[0], 1).contiguous()
    return Fp6Weight(two, four, inverse, weight.shape[1])


def encode_fp6(values: Tensor) -> Tensor:
    """The codes of values of E3M2 (in any floating dtype): uint8, same shape. -0 becomes +0."""
    magnitudes = E3M2.table[:SIGN].to(values.device)
    codes = torch.bucketize(values.float().abs().contiguous(), magnitudes, out_int32=True)
    return torch.where(values < 0, codes + SIGN, codes).to(torch.uint8)


def decode_fp6(codes: Tensor) -> Tensor:
    """The values of codes 0 to 63: float32, same shape."""
    return E3M2.table.to(codes.device)[codes.int()]


def pack_fp6(codes: Tensor) -> tuple[Tensor, Tensor]:
    """`two` and `four` of codes, uint8 [rows, columns]; see the module.

    Raises ValueError unless codes are a matrix of uint8 below 64.
    """
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(f"Codes are a uint8 matrix, got {codes.dtype} of shape {tuple(codes.shape)}.")
    if codes.numel() and int(codes.max()) >= 1 << E3M2.bits:
        raise ValueError(f"Codes have {E3M2.bits} bits, got {int(codes.max())}.")
    padded = functional.pad(codes, (0, -codes.shape[1] % GROUP))
    low, high = (padded & 0xF).chunk(2, 1)
    first, second, third, fourth = (padded >> 4).chunk(4, 1)
    return first | second << 2 | third << 4 | fourth << 6, low | high << 4


def unpack_fp6(two: Tensor, four: Tensor, columns: int) -> Tensor:
    """The codes that `pack_fp6` packed: uint8 [rows, columns].

    Raises ValueError if the shapes of the two parts do not fit each other or `columns`.
    """
    padded = -(-columns // GROUP) * GROUP
    if two.shape != (*four.shape[:-1], padded // 4) or four.shape[-1] != padded // 2:
        raise ValueError(
            f"{columns} columns take {padded // 4} and {padded // 2} bytes a row, got parts of shape "
            f"{tuple(two.shape)} and {tuple(four.shape)}."
        )
    low = torch.cat((four & 0xF, four >> 4), 1)
    high = torch.cat((two & 3, two >> 2 & 3, two >> 4 & 3, two >> 6), 1)
    return (high << 4 | low)[:, :columns]


class Fp6Linear(nn.Module):
    """A linear layer with an FP6 weight, for evaluation: W6A16.

    Each call dequantises the weight to the dtype of the input (or autocast's) and multiplies in it. Gradients
    reach the input but not the weight, which is not a parameter. `state_dict` holds the packed bytes. The
    scales stay float32 when the module is cast to another dtype.
    """

    two: Tensor
    four: Tensor
    inverse_scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Fp6Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.columns, weight.two.shape[0]
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias must have shape ({self.out_features},), got {tuple(bias.shape)}.")
        self.register_buffer("two", weight.two)
        self.register_buffer("four", weight.four)
        self.register_buffer("inverse_scale", weight.inverse_scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "Fp6Linear":
        """The same layer with its weight quantised; the original is not changed."""
        return cls(quantize_fp6(linear.weight.detach()), linear.bias)

    @property
    def weight(self) -> Fp6Weight:
        return Fp6Weight(self.two, self.four, self.inverse_scale, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] in the input's dtype, or autocast's."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return functional.linear(input, self.weight.dequantize(input.dtype), bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={E3M2.name}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Fp6Linear":
        scale = self.inverse_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inverse_scale.dtype != scale.dtype:
            self.inverse_scale = scale.to(self.inverse_scale.device)
        return self
