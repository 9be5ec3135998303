"""Where sources write what they see: one statistics buffer per device and per pace.

Tensors that are seen in every step and those that are only looked at in sampled steps lie on different
boards, so that the latter cost nothing in between. All boards together have one catalogue, in the order of
registration.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8scope_kernels import BLOCK_STATISTICS, STATISTICS, Pace, Slot, StatisticsBuffer, TensorInfo

NUMEL, AMAX, SCALE, NONFINITE = (STATISTICS.index(name) for name in ("numel", "amax", "scale", "nonfinite"))
COUNTS = slice(SCALE + 1, NONFINITE)
"""`saturated`, `underflow` and `subnormal`."""

NOTES: tuple[str, ...] = ("scale_frozen", "scale_stale", "history_amax", "update_ratio")
"""What sources say of a tensor in sampled steps, beside what the kernels count; see docs/watching.md."""

SAMPLED_STATISTICS: tuple[str, ...] = (*BLOCK_STATISTICS, "sq_error", "sq_signal", *NOTES)
"""The statistics that are taken in sampled steps only."""

FIRST_CAPACITY = 256


class Board:
    """Statistics of some tensors on one device; `positions[i]` is row i's place in the catalogue.

    `every_step` says whether its rows are written in every step, or in sampled ones only.
    """

    def __init__(self, device: torch.device, capacity: int, *, every_step: bool) -> None:
        self.buffer = StatisticsBuffer(capacity, device)
        self.every_step = every_step
        self.is_plain = every_step and device.type == "cpu"
        """Whether it is written in every step, on the host, where there is no device to wait for."""
        self.positions: list[int] = []
        self._places = np.zeros(0, np.int64)
        self._in_order = True
        self._notes: Tensor | None = None

    def places(self, rows: int) -> NDArray[np.int64]:
        """`positions` of the first `rows` rows: int64 [rows]. For one thread, the recorder's."""
        if len(self._places) < rows:
            self._places = np.array(self.positions, np.int64)
            self._in_order = bool((self._places == np.arange(len(self._places))).all())
        return self._places[:rows]

    def is_in_order(self, rows: int) -> bool:
        """Whether these rows are the first of the catalogue, one after the other."""
        return len(self.places(rows)) == rows and self._in_order

    @property
    def sampling(self) -> bool:
        """Whether this is a sampled step."""
        return self.buffer.sampling

    @sampling.setter
    def sampling(self, value: bool) -> None:
        if value and not self.buffer.sampling:
            # Steps that are not sampled write these too, and leave them.
            self.buffer.block_storage.zero_()
        self.buffer.sampling = value

    @property
    def notes(self) -> Tensor:
        """Float64 [tensors, NOTES], NaN where nothing was said since the last step."""
        rows, known = len(self.buffer), self._notes
        if known is None or len(known) < rows:
            self._notes = self.buffer.storage.new_full((self.buffer.capacity, len(NOTES)), torch.nan)
            if known is not None:
                self._notes[: len(known)] = known
        assert self._notes is not None
        return self._notes[:rows]

    def parts(self) -> list[Tensor]:
        """What is to be sent of this step: float64 [tensors, width] each, see `assembly.WIDTHS`."""
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
        """Say `values` [slots] of these tensors."""
        device = self.buffer.device
        rows = to_device(torch.tensor([slot.index for slot in slots]), device)
        self.notes[:, NOTES.index(name)].index_copy_(0, rows, to_device(values.double(), device))

    def clear(self) -> None:
        """Start the next step."""
        if self.every_step or self.buffer.sampling:
            self.buffer.zero_()
        if self._notes is not None and self.buffer.sampling:
            self._notes.fill_(torch.nan)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The tensor there, without waiting for the device."""
    if values.device == device:
        return values
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class Boards:
    """All boards of a run, and the one catalogue of their tensors."""

    def __init__(self) -> None:
        self.all: list[Board] = []
        self.catalogue: list[TensorInfo] = []
        self.sampling = False
        """Whether this is a sampled step."""
        self.pace = Pace()
        """Shared by all: whether plain tensors are read in this step."""
        self._places: dict[str, int] = {}
        self._by_kind: dict[tuple[torch.device, bool], Board] = {}
        self.plain: Board | None = None
        """The only board that is written in every step, if it is on the host: nearly always, on a CPU."""

    def on(self, device: torch.device, *, every_step: bool = True, capacity: int = FIRST_CAPACITY) -> Board:
        """The board for tensors on this device."""
        board = self._by_kind.get((device, every_step))
        if board is None:
            board = Board(device, capacity, every_step=every_step)
            board.buffer.pace = self.pace
            self._by_kind[device, every_step] = board
            self.all.append(board)
            steady = [each for each in self.all if each.every_step]
            self.plain = steady[0] if len(steady) == 1 and steady[0].is_plain else None
        return board

    def place(self) -> None:
        """Give the rows that are new a place in the catalogue; a name that is there keeps its own."""
        for board in self.all:
            for info in board.buffer.catalogue[len(board.positions) :]:
                place = self._places.setdefault(info.name, len(self.catalogue))
                if place == len(self.catalogue):
                    self.catalogue.append(info)
                board.positions.append(place)

    def is_placed(self) -> bool:
        """Whether every row has its place."""
        return all(len(board.positions) == len(board.buffer) for board in self.all)

    def sample(self, value: bool) -> None:
        """Set whether the step that begins is a sampled one."""
        self.sampling = value
        for board in self.all:
            board.sampling = value
            if value and not board.every_step:
                # A step that was begun and never ended may have left something.
                board.clear()
