"""Values that tests of several backends quantise."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8scope_kernels.statistics import STATISTICS


def all_bfloat16() -> Tensor:
    """Every bit pattern of bfloat16: [65536]."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def empty_row() -> Tensor:
    """A row of a statistics buffer: float64 [len(STATISTICS)], zeros."""
    return torch.zeros(len(STATISTICS), dtype=torch.float64)
