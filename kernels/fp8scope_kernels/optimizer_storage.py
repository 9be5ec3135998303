"""The stored state of an optimizer in 8 and 16 bits: tensors of a bucket side by side in one matrix.

A bucket is updated at once, so that the number of torch's operators does not grow with the number of tensors.
Each tensor begins a row of BLOCK elements, and zeros fill up its last one: no block holds two tensors, and
the numbers of a tensor do not depend on which others are in its bucket.

| tensor         | stored in | scales                        | rounding  |
|----------------|-----------|-------------------------------|-----------|
| first moment   | E4M3      | one for each BLOCK elements   | at random |
| second moment  | FP16      | one                           | nearest   |
| master weight  | FP16      | one                           | nearest   |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from fp8scope_kernels.block_quantization import quantize_blocks
from fp8scope_kernels.formats import E4M3, Format
from fp8scope_kernels.plain_tensors import can_branch_on
from fp8scope_kernels.quantization import amax_to_scale
from fp8scope_kernels.random_stream import GROUP, WORD, Draw
from fp8scope_kernels.recipes import BlockScaling
from fp8scope_kernels.reference import infinite_to_nan_
from fp8scope_kernels.statistics import Slot

FP16 = Format(name="FP16", exponent_bits=5, mantissa_bits=10, bias=15, specials="ieee", dtype=torch.float16)

FORMAT_OF: dict[str, Format] = {"exp_avg": E4M3, "exp_avg_sq": FP16, "master": FP16}
"""The format of each tensor of the state."""

BLOCK = GROUP
"""Elements that share a scale of the first moment, in the order of the flattened tensor."""

SCALING = BlockScaling(power_of_two=False)

GOLDEN_RATIO = 0x9E3779B9
"""2^32 over the golden ratio: how far the word of an element moves in a step."""

SEED = 0x2545F4914F6CDD1D
"""Of the random words. It is the same for all ranks, which must store the same bits."""


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """The rows of a bucket. `rows` and `sizes` are those of each tensor."""

    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    tensor_of_row: Tensor
    """int64 [rows]"""
    block_of_row: Tensor
    """int64 [rows], the row's number within its tensor."""
    padding: Tensor | None
    """bool [rows, BLOCK], True where a row is filled up; None if there is no such element."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors, of one dtype, as the rows of a matrix [rows, BLOCK]; a single one may be a view."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        if self.padding is None:
            return (flat[0] if len(flat) == 1 else torch.cat(flat)).view(-1, BLOCK)
        zeros = flat[0].new_zeros(BLOCK)
        filling = {size: zeros[:size] for size in {-size % BLOCK for size in self.sizes}}
        filled = ((x, filling[-size % BLOCK]) for x, size in zip(flat, self.sizes, strict=True))
        return torch.cat(list(chain.from_iterable(filled))).view(-1, BLOCK)

    def split(self, matrix: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Views of the rows of each tensor, in the shapes of `like`."""
        flat = matrix.reshape(-1)
        if self.padding is not None:
            sizes = chain.from_iterable((size, -size % BLOCK) for size in self.sizes)
            parts: Sequence[Tensor] = torch.split_with_sizes(flat, list(sizes))[::2]
        else:
            parts = torch.split_with_sizes(flat, self.sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]

    def of_rows(self, values: Tensor) -> Tensor:
        """One value per tensor [tensors] -> [rows, 1]."""
        return values[self.tensor_of_row].unsqueeze(1)

    def largest(self, of_rows: Tensor) -> Tensor:
        """The largest of each tensor's rows: float32 [rows], at least 0, to [tensors]."""
        zeros = of_rows.new_zeros(len(self.sizes))
        return zeros.scatter_reduce_(0, self.tensor_of_row, of_rows, "amax")


@lru_cache(maxsize=512)
def layout_of(sizes: tuple[int, ...], device: torch.device) -> BucketLayout:
    """The layout of tensors with these numbers of elements."""
    rows = tuple(-(-size // BLOCK) for size in sizes)
    counts = torch.tensor(rows, device=device)
    tensor_of_row = torch.repeat_interleave(torch.arange(len(rows), device=device), counts)
    first = counts.cumsum(0) - counts
    block_of_row = torch.arange(len(tensor_of_row), device=device) - first[tensor_of_row]
    padding = None
    if any(size % BLOCK for size in sizes):
        left = torch.tensor(sizes, device=device)[tensor_of_row] - BLOCK * block_of_row
        padding = torch.arange(BLOCK, device=device) >= left.unsqueeze(1)
    return BucketLayout(
        sizes=sizes, rows=rows, tensor_of_row=tensor_of_row, block_of_row=block_of_row, padding=padding
    )


@dataclass(kw_only=True)
class JoinedState:
    """One tensor of the state of each parameter in a bucket: `codes` [rows, BLOCK], and their scales.

    `scale` is [rows] for a first moment, else [tensors]. `parts` are views: each parameter's own of both.
    """

    layout: BucketLayout
    key: str
    codes: Tensor
    scale: Tensor
    parts: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, layout: BucketLayout, key: str, parts: Sequence[tuple[Tensor, Tensor]]) -> "JoinedState":
        """Join tensors, each with its scales. A single one may stay in its memory."""
        codes = layout.join([part for part, _ in parts])
        scale = torch.cat([of_part.view(-1) for _, of_part in parts])
        return cls.split(layout, key, codes, scale, [part for part, _ in parts])

    @classmethod
    def split(
        cls, layout: BucketLayout, key: str, codes: Tensor, scale: Tensor, like: Sequence[Tensor]
    ) -> "JoinedState":
        """The parts of what was joined, in the shapes of `like`."""
        if key == "exp_avg":
            scales = list(torch.split_with_sizes(scale, layout.rows))
        else:
            # `unbind` takes several times as long for numbers as for rows.
            scales = [number.view(()) for number in scale.view(-1, 1).unbind()]
        parts = list(zip(layout.split(codes, like), scales, strict=True))
        return cls(layout=layout, key=key, codes=codes, scale=scale, parts=parts)

    def load(self) -> Tensor:
        """The values in float32 [rows, BLOCK], a new tensor."""
        inverse = self.scale.reciprocal()
        of_rows = inverse.unsqueeze(1) if self.key == "exp_avg" else self.layout.of_rows(inverse)
        return self.codes.float().mul_(of_rows)

    def store(
        self, values: Tensor, numbers: Sequence[int], step: int, slots: Sequence[Slot | None] = ()
    ) -> None:
        """Round float32 [rows, BLOCK] in place of what is stored, and count what that does in `slots`.

        `numbers`: of the tensors in the optimizer. A tensor without a slot is not counted.
        """
        if self.key == "exp_avg":
            codes, scale = round_moment(self.layout, values, numbers, step)
        else:
            codes, scale = round_fp16(self.layout, values)
        if any(slots):
            count(self.layout, slots, values, codes, scale, FORMAT_OF[self.key])
        if self.key == "exp_avg_sq":
            codes.masked_fill_((codes == 0) & (values > 0), FP16.smallest_subnormal)
        self.codes.copy_(codes)
        self.scale.copy_(scale)


def round_moment(layout: BucketLayout, x: Tensor, numbers: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
    """x, float32 [rows, BLOCK], in E4M3 with a scale for each row: codes, and scales [rows].

    Rounding is at random, because to nearest a moment that changes by less than half a unit in the last place
    would not decay. An element has one random word, of its tensor's number and its place in the tensor. It
    moves by the golden ratio in every step (a Weyl sequence): errors of successive steps cancel, and those of
    new words would add up in the moment. Moments decay at the right rate, to 0.002 of beta1. A
    resumed training and all ranks have the same words.
    """
    if not len(x):
        return x.to(torch.float8_e4m3fn), x.new_ones(0)
    own = torch.tensor(numbers, device=x.device)[layout.tensor_of_row]
    groups = torch.stack((layout.block_of_row, own))
    draw = Draw(torch.tensor([SEED, 0], device=x.device), 0, groups, step * GOLDEN_RATIO & WORD)
    blocks = quantize_blocks(x, E4M3, (1, BLOCK), SCALING, dtype=torch.float8_e4m3fn, stochastic=draw)
    return blocks.values, blocks.scale.view(-1)


def round_fp16(layout: BucketLayout, x: Tensor) -> tuple[Tensor, Tensor]:
    """x, float32 [rows, BLOCK], in FP16 with a scale for each tensor: codes, and scales [tensors].

    The kernels do not support FP16: this is plain torch. As in FP8, a non-finite element stays visible.
    """
    largest, is_finite = _largest_finite(x)
    scale = amax_to_scale(layout.largest(largest), FP16)
    clamped = (x * layout.of_rows(scale)).clamp_(-FP16.max, FP16.max)
    if not is_finite:
        infinite_to_nan_(clamped, x)
    return clamped.half(), scale


def _largest_finite(x: Tensor) -> tuple[Tensor, bool]:
    """The largest magnitude of the finite elements of each row, and whether all are known to be finite."""
    magnitude = x.abs()
    if can_branch_on(x):
        largest = magnitude.amax(1)
        if bool(torch.isfinite(largest).all()):
            return largest, True
    return magnitude.nan_to_num_(0.0, 0.0, 0.0).amax(1), False


def count(
    layout: BucketLayout,
    slots: Sequence[Slot | None],
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    format: Format,
) -> None:
    """Add the statistics of each tensor of a bucket to its row, as `quantize` and `quantize_blocks` do.

    x: float32 [rows, BLOCK], before it was rounded to `codes` with `scale`, [tensors] or [rows].
    """
    of_rows = scale.unsqueeze(1) if format is E4M3 else layout.of_rows(scale)
    magnitude, finite = codes.float().abs(), torch.isfinite(x)
    elements = (
        ((x * of_rows).abs() > format.limit) & finite,
        (x != 0) & (magnitude == 0),
        (magnitude > 0) & (magnitude < format.smallest_normal),
        ~finite,
    )
    counts = torch.stack([mask.sum(1) for mask in elements], dim=1).double()
    totals = counts.new_zeros(len(slots), len(elements)).index_add_(0, layout.tensor_of_row, counts)
    bound = [(number, slot) for number, slot in enumerate(slots) if slot is not None]
    numbers = torch.tensor([number for number, _ in bound], device=x.device)
    storage = bound[0][1].buffer.storage
    index = torch.tensor([slot.index for _, slot in bound], device=storage.device)
    rows = storage[index]
    rows[:, 0] += torch.tensor([layout.sizes[number] for number, _ in bound], device=rows.device)
    rows[:, 1] = torch.maximum(rows[:, 1], layout.largest(_largest_finite(x)[0])[numbers].to(rows))
    rows[:, 2] = (_median(layout, scale) if format is E4M3 else scale)[numbers].to(rows)
    rows[:, 3:] += totals[numbers].to(rows)
    storage.index_copy_(0, index, rows)


def _median(layout: BucketLayout, scale: Tensor) -> Tensor:
    """The median of each tensor's scales, the lower of the middle two; 1 for a tensor without elements."""
    if not len(scale):
        return scale.new_ones(len(layout.rows))
    order = scale.argsort()
    # Sorted by tensor, and within a tensor by size.
    order = order[layout.tensor_of_row[order].argsort(stable=True)]
    counts = torch.tensor(layout.rows, device=scale.device)
    middle = counts.cumsum(0) - counts + (counts - 1).clamp_(min=0) // 2
    medians = scale[order[middle.clamp_(max=len(scale) - 1)]]
    return torch.where(counts > 0, medians, 1.0)
