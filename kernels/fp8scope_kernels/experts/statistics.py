"""Counts the tensors of experts: a row for each expert, and one for all experts of a layer.

A pass quantises the tensor of one expert after the other, each into a row of its own. The rows are then added
to those of the statistics buffer, all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8scope_kernels.recipes import DelayedScaling, Recipe
from fp8scope_kernels.statistics import BLOCK_STATISTICS, SAMPLE_SIZE, STATISTICS, Slot

NUMEL, AMAX, SCALE = (STATISTICS.index(name) for name in ("numel", "amax", "scale"))
COUNTS = slice(SCALE + 1, None)
BLOCKS = slice(0, 2)
SMALLEST, MEDIAN, LARGEST = (BLOCK_STATISTICS.index(f"scale_{name}") for name in ("min", "median", "max"))


@dataclass(frozen=True)
class ExpertSlots:
    """The rows of one of a layer's tensors: `layer`, of all experts, and those of each expert, or none.

    The layer's row has the sums of the counts and the largest amax. Its `scale` is the smallest of the step,
    which is that of the largest amax; with a scale per block, the median of the experts' medians; and NaN
    with delayed scaling, where the scales of experts follow the amaxes of other calls.
    """

    layer: Slot
    experts: tuple[Slot, ...] = ()


class _RowSlot(Slot):
    """Rows of a pass that are not in the buffer yet."""

    def __init__(self, slot: Slot, row: Tensor, block_row: Tensor, sample_row: Tensor | None) -> None:
        super().__init__(slot.buffer, slot.index)
        self._row, self._block_row, self._sample_row = row, block_row, sample_row

    @property
    def row(self) -> Tensor:
        return self._row

    @property
    def block_row(self) -> Tensor:
        return self._block_row

    @property
    def sample_row(self) -> Tensor | None:
        return self._sample_row


class ExpertCounts:
    """The counts of one pass over the experts' tensors. `add` adds them to the statistics buffer."""

    def __init__(self, slots: ExpertSlots, experts: int, recipe: Recipe) -> None:
        self._slots = slots
        # Block recipes have a scale per block of all three tensors.
        self._by_blocks = recipe.block_of("input") is not None
        self._has_common_scale = not isinstance(recipe, DelayedScaling)
        buffer = slots.layer.buffer
        with torch.inference_mode(False):
            self._rows = buffer.storage.new_zeros(experts, len(STATISTICS))
            self._block_rows = buffer.storage.new_zeros(experts, len(BLOCK_STATISTICS))
            self._samples = (
                buffer.storage.new_zeros(experts, SAMPLE_SIZE) if slots.layer.sample_row is not None else None
            )
        self._experts: list[int] = []

    def slot(self, expert: int) -> Slot:
        """The rows of one expert in this pass."""
        self._experts.append(expert)
        sample = None if self._samples is None else self._samples[expert]
        return _RowSlot(self._slots.layer, self._rows[expert], self._block_rows[expert], sample)

    @torch.no_grad()
    def add(self) -> None:
        """Add the rows of the experts that were quantised to those of the buffer."""
        experts = self._experts
        whole = len(experts) == len(self._rows) and experts == sorted(experts)
        rows, blocks, samples = (
            None if counted is None else counted if whole else counted[experts]
            for counted in (self._rows, self._block_rows, self._samples)
        )
        assert rows is not None and blocks is not None
        layer = self._slots.layer
        _add_layer(layer.row, rows, self._common_scale(layer.row, rows))
        if self._by_blocks:
            _add_layer_blocks(layer.block_row, blocks)
        if samples is not None and layer.sample_row is not None:
            layer.sample_row.add_(samples.sum(0))
        if self._slots.experts:
            self._add_experts([self._slots.experts[expert] for expert in experts], rows, blocks, samples)

    def _common_scale(self, row: Tensor, rows: Tensor) -> Tensor:
        """The scale of the layer's row, see `ExpertSlots`."""
        scales = rows[:, SCALE]
        if self._by_blocks:
            return scales.median()
        if not self._has_common_scale:
            return torch.full_like(scales[0], torch.nan)
        # Of the experts with a largest element: tensors of zeros say nothing of a scale.
        with_amax = rows[:, AMAX] > 0
        used = torch.where(with_amax | ~with_amax.any(), scales, torch.inf).amin()
        return torch.where(row[NUMEL] > 0, torch.minimum(row[SCALE], used), used)

    def _add_experts(
        self, slots: Sequence[Slot], rows: Tensor, blocks: Tensor, samples: Tensor | None
    ) -> None:
        buffer = slots[0].buffer
        indices = [slot.index for slot in slots]
        first = indices[0]
        # Rows are next to each other if all experts got tokens. A tensor of indices is copied to the device.
        at: slice | list[int] = indices
        if indices == list(range(first, first + len(indices))):
            at = slice(first, first + len(indices))
        storage = buffer.storage
        storage[at] = torch.cat(
            (
                storage[at, NUMEL, None] + rows[:, NUMEL, None],
                torch.maximum(storage[at, AMAX, None], rows[:, AMAX, None]),
                rows[:, SCALE, None],
                storage[at, COUNTS] + rows[:, COUNTS],
            ),
            1,
        )
        if self._by_blocks:
            block_storage = buffer.block_storage
            block_storage[at] = torch.cat(
                (block_storage[at, BLOCKS] + blocks[:, BLOCKS], blocks[:, SMALLEST:]), 1
            )
        if samples is not None and buffer.sample_storage is not None:
            buffer.sample_storage[at] += samples


def _add_layer(row: Tensor, rows: Tensor, scale: Tensor) -> None:
    row[SCALE].copy_(scale)
    row[NUMEL] += rows[:, NUMEL].sum()
    torch.maximum(row[AMAX], rows[:, AMAX].amax(), out=row[AMAX])
    row[COUNTS] += rows[:, COUNTS].sum(0)


def _add_layer_blocks(row: Tensor, rows: Tensor) -> None:
    row[BLOCKS] += rows[:, BLOCKS].sum(0)
    row[SMALLEST] = rows[:, SMALLEST].amin()
    row[MEDIAN] = rows[:, MEDIAN].median()
    row[LARGEST] = rows[:, LARGEST].amax()
