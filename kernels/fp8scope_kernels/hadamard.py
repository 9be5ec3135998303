"""The random Hadamard transform of 16 elements, as NVFP4 takes it for the gradients of weights.

A product does not change when both operands are rotated along the dimension that it sums over. Large elements
are spread over their 16 neighbours, so that fewer of them decide the scale of a block (NVIDIA, "Pretraining
Large Language Models with NVFP4", arXiv 2509.25149).

The transform of 16 elements v is H (d * v) / 4, where H is Sylvester's Hadamard matrix, of entries +1 and -1.
The signs d are fixed: the lower 16 bits of Philox4x32-10's first word for key 0 and counter 0, where a 1 is a
minus. All tensors of all layers have the same, as in the paper. It is computed in float32 in four steps. Step
k = 1, 2, 4, 8 replaces the elements i and i + k by their sum and difference, for each i without the bit k.
The last operation is the division by 4, which is exact but for subnormals.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels import backends
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.plain_tensors import is_abstract, readable

WIDTH = 16
MINUS = 0x6627E8D5
"""Philox4x32-10's first word for key 0 and counter 0, the authors' own known answer."""


def rotate(x: Tensor) -> Tensor:
    """x [rows, columns], any floating dtype, rotated in groups of 16 columns: float32.

    Columns are padded with zeros to a multiple of 16.
    """
    x = readable(x)
    if not is_abstract(x) and x.numel() and backends.use_compiled(x):
        return cpu_backend.rotate(x, MINUS)
    rows, columns = x.shape
    groups = -(-columns // WIDTH)
    padded = functional.pad(x.float(), (0, groups * WIDTH - columns))
    values = padded.reshape(rows, groups, WIDTH) * signs(x.device)
    for step in (1, 2, 4, 8):
        pairs = values.view(rows, groups, WIDTH // (2 * step), 2, step)
        low, high = pairs.unbind(3)
        values = torch.stack((low + high, low - high), 3).view(rows, groups, WIDTH)
    return values.mul_(0.25).view(rows, groups * WIDTH)


def signs(device: torch.device | str = "cpu") -> Tensor:
    """The signs d, float32 [16]."""
    bits = torch.tensor(MINUS, device=device) >> torch.arange(WIDTH, device=device)
    return 1.0 - 2.0 * (bits & 1).float()
