"""Tables of tensor statistics: one for each device, and one more for tensors of sampled steps only.

Tensors that are observed in every step and those that are observed in sampled steps have different tables, so
that the latter cost nothing in between. All tables share one catalogue, in the order of registration.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8scope.observe.tensors.switched_hooks import HookSwitch
from fp8scope_kernels import (
    BLOCK_STATISTICS,
    SAMPLE_SIZE,
    STATISTICS,
    Pace,
    Slot,
    StatisticsBuffer,
    TensorInfo,
)
from fp8scope_kernels.devices import to_device

NUMEL, AMAX, SCALE, NONFINITE = (STATISTICS.index(name) for name in ("numel", "amax", "scale", "nonfinite"))
COUNTS = slice(SCALE + 1, NONFINITE)
"""`saturated`, `underflow` and `subnormal`."""

NOTES: tuple[str, ...] = (
    "scale_frozen",
    "scale_stale",
    "history_amax",
    "update_ratio",
    "kurtosis",
    "logit_bound",
    "load_max",
    "load_imbalance",
)
"""Statistics of sampled steps that the kernels do not count; see docs/watching.md."""

SAMPLED_STATISTICS: tuple[str, ...] = (*BLOCK_STATISTICS, "sq_error", "sq_signal", *NOTES)
"""The statistics that are collected in sampled steps only."""

WIDTHS = (len(STATISTICS), len(BLOCK_STATISTICS), SAMPLE_SIZE, len(NOTES))
"""Values of a row in each of `StatisticsTable.parts`; only the first part is sent in unsampled steps."""

FIRST_CAPACITY = 256


class StatisticsTable:
    """Statistics of tensors on one device; `positions[i]` is the position of row i in the catalogue.

    `every_step`: whether the rows are written in every step, or in sampled steps only.
    """

    def __init__(self, device: torch.device, capacity: int, *, every_step: bool) -> None:
        self.buffer = StatisticsBuffer(capacity, device)
        self.every_step = every_step
        self.is_plain = every_step and device.type == "cpu"
        """Whether it is written in every step and on the host, where there is no device to wait for."""
        self.positions: list[int] = []
        self._places = np.zeros(0, np.int64)
        self._in_order = True
        self._notes: Tensor | None = None

    def places(self, rows: int) -> NDArray[np.int64]:
        """Return `positions` of the first `rows` rows: int64 [rows]. For the recorder's thread only."""
        if len(self._places) < rows:
            self._places = np.array(self.positions, np.int64)
            self._in_order = bool((self._places == np.arange(len(self._places))).all())
        return self._places[:rows]

    def is_in_order(self, rows: int) -> bool:
        """Return whether these rows are the first of the catalogue, in its order."""
        return len(self.places(rows)) == rows and self._in_order

    @property
    def sampling(self) -> bool:
        """Return whether this is a sampled step."""
        return self.buffer.sampling

    @sampling.setter
    def sampling(self, value: bool) -> None:
        if value and not self.buffer.sampling:
            # Unsampled steps also write these values and do not clear them.
            self.buffer.block_storage.zero_()
        self.buffer.sampling = value

    @property
    def notes(self) -> Tensor:
        """Float64 [tensors, NOTES], NaN where nothing was noted in this step."""
        rows, layout = len(self.buffer), self._notes
        if layout is None or len(layout) < rows:
            self._notes = self.buffer.storage.new_full((self.buffer.capacity, len(NOTES)), torch.nan)
            if layout is not None:
                self._notes[: len(layout)] = layout
        assert self._notes is not None
        return self._notes[:rows]

    def parts(self) -> list[Tensor]:
        """Return the values of this step to be copied: float64 [tensors, width] each, see `WIDTHS`."""
        rows = len(self.positions)
        parts = [self.buffer.storage[:rows]]
        if self.sampling and self.buffer.sample_storage is not None:
            parts += [
                self.buffer.block_storage[:rows],
                self.buffer.sample_storage[:rows],
                self.notes[:rows],
            ]
        return parts

    def note(self, name: str, slots: list[Slot], values: Tensor) -> None:
        """Set the note `name` of these tensors to `values` [slots]."""
        device = self.buffer.device
        rows = to_device(torch.tensor([slot.index for slot in slots], device="cpu"), device)
        self.notes[:, NOTES.index(name)].index_copy_(0, rows, to_device(values.double(), device))

    def note_largest(self, name: str, row: int, value: Tensor) -> None:
        """Set the note `name` of this row to `value` [], unless a larger one is noted. NaN is ignored."""
        noted = self.notes[row, NOTES.index(name)]
        finite = torch.where(torch.isfinite(value), value.double(), torch.nan)
        torch.fmax(noted, to_device(finite, self.buffer.device), out=noted)

    def clear(self) -> None:
        """Zero the values for the next step."""
        if self.every_step or self.buffer.sampling:
            self.buffer.zero_()
        if self._notes is not None and self.buffer.sampling:
            self._notes.fill_(torch.nan)


class StatisticsTables:
    """All tables of a run, and the catalogue of their tensors."""

    def __init__(self) -> None:
        self.all: list[StatisticsTable] = []
        self.catalogue: list[TensorInfo] = []
        self.sampling = False
        """Whether this is a sampled step."""
        self.pace = Pace()
        """Whether plain tensors are read in this step; shared by all tables."""
        self.reading_hooks = HookSwitch()
        """The hooks that `pace` makes read."""
        self.sampling_hooks = HookSwitch(in_graphs=False)
        """The hooks of sampled steps on every layer."""
        self._places: dict[str, int] = {}
        self._by_kind: dict[tuple[torch.device, bool], StatisticsTable] = {}
        self.plain: StatisticsTable | None = None
        """The only table that is written in every step, if it is on the host: the usual case on a CPU."""

    def on(
        self, device: torch.device, *, every_step: bool = True, capacity: int = FIRST_CAPACITY
    ) -> StatisticsTable:
        """Return the table for tensors on this device; make it if needed."""
        table = self._by_kind.get((device, every_step))
        if table is None:
            table = StatisticsTable(device, capacity, every_step=every_step)
            table.buffer.pace = self.pace
            table.sampling = self.sampling
            self._by_kind[device, every_step] = table
            self.all.append(table)
            steady = [table for table in self.all if table.every_step]
            self.plain = steady[0] if len(steady) == 1 and steady[0].is_plain else None
        return table

    def note_derived(
        self, name: str, role: str, device: torch.device, elements: int, **notes: Tensor
    ) -> None:
        """Note values [] of something that is no stored tensor, such as logits; the row is made if needed.

        It has `elements` and these notes, and no other statistic.
        """
        table = self.on(device, every_step=False)
        slot = table.buffer.register(name, format=None, shape=(-1,), role=role)
        row = slot.row
        row[NUMEL] += elements
        row[NUMEL + 1 :].fill_(torch.nan)
        for note, value in notes.items():
            table.note_largest(note, slot.index, value)

    def place(self) -> None:
        """Add the new rows to the catalogue; a known name keeps its position."""
        for table in self.all:
            for info in table.buffer.catalogue[len(table.positions) :]:
                index = self._places.setdefault(info.name, len(self.catalogue))
                if index == len(self.catalogue):
                    self.catalogue.append(info)
                table.positions.append(index)

    def close(self) -> None:
        """Remove the hooks of the layers."""
        self.reading_hooks.remove()
        self.sampling_hooks.remove()

    def is_placed(self) -> bool:
        """Return whether every row has a position in the catalogue."""
        return all(len(table.positions) == len(table.buffer) for table in self.all)

    def sample(self, value: bool) -> None:
        """Set whether the step that begins is a sampled one."""
        self.sampling = value
        self.sampling_hooks.set(value)
        for table in self.all:
            table.sampling = value
            if value and not table.every_step:
                # A step that was begun and never ended may have left values.
                table.clear()
