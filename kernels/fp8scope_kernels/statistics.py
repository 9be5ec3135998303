"""The statistics of quantised tensors: what their rows hold, and the buffer that holds the rows.

A row of `STATISTICS` is float64, for a tensor x, scale s, quantised tensor q and format F with largest finite
value M:

| statistic   | definition                                                                               |
|-------------|------------------------------------------------------------------------------------------|
| `numel`     | elements seen                                                                            |
| `amax`      | max of abs(x) over the finite elements; 0 for an empty or all-non-finite tensor          |
| `scale`     | s, the multiplier used at this step (not the one computed for the next)                  |
| `saturated` | finite elements with abs(x*s) > limit, the float32 next above M: what clamping changed   |
| `underflow` | elements with x != 0 and q == 0                                                          |
| `subnormal` | elements with q != 0 below F's smallest normal                                           |
| `nonfinite` | NaN or Inf elements of x: counted apart, so that they can never hide in amax             |

The limit is not M itself: the scale M / amax is rounded, and so is its product with amax, which can be the
float32 next above M, but never more (see `Format.limit`). Such an element becomes M without loss.

A sample is one more float64 row, `[sq_error, sq_signal, exponents...]`, of statistics that are too expensive
for every step; see `accumulate_sample`:

| entry       | definition                                                                               |
|-------------|------------------------------------------------------------------------------------------|
| `sq_error`  | sum of (x - q/s)^2 over the elements where both are finite                               |
| `sq_signal` | sum of x^2 over the same elements; SQNR in dB is 10 log10(sq_signal / sq_error)          |
| `exponents` | how many elements have floor(log2 abs(x)) = e, for e from -149 to 127 (every float32);   |
|             | before them one bin for zeros, after them one for NaN and Inf                            |
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8scope_kernels.devices import Event
from fp8scope_kernels.formats import Format

STATISTICS: tuple[str, ...] = ("numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite")

BLOCK_STATISTICS: tuple[str, ...] = ("blocks", "saturated_blocks", "scale_min", "scale_median", "scale_max")
"""Of tensors with a scale per block: the number of blocks, the number of blocks with a saturated element, and
the smallest, median and largest block scale of the last call."""

MIN_EXPONENT = -149
MAX_EXPONENT = 127
EXPONENT_BINS = MAX_EXPONENT - MIN_EXPONENT + 3
SAMPLE_SIZE = 2 + EXPONENT_BINS

ROW_BYTES = 8 * len(STATISTICS)
MAX_TENSORS = 1_000_000
MAX_SPARE = 8
"""Cleared storages that are kept for later steps."""


def exponent_bin(exponent: int) -> int:
    """The index in `exponents` of values in [2^exponent, 2^(exponent+1)).

    Raises ValueError where float32 has no such value. Zeros are at 0, non-finite elements at the end.
    """
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise ValueError(f"float32 has exponents {MIN_EXPONENT} to {MAX_EXPONENT}, got {exponent}.")
    return exponent - MIN_EXPONENT + 1


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One line of the catalogue.

    `name` is `<module path>.<role>`. `shape` has -1 where a size is known only at run time (the tokens of an
    activation); `numel` is then 0, and the statistic of that name carries the number.
    """

    name: str
    module: str
    role: str
    format: str
    shape: tuple[int, ...]
    numel: int


class Slot:
    """One tensor's rows in a `StatisticsBuffer`. Raises IndexError if the buffer has no row of this index."""

    def __init__(self, buffer: "StatisticsBuffer", index: int) -> None:
        if not 0 <= index < len(buffer):
            raise IndexError(f"The buffer has rows 0 to {len(buffer) - 1}, not {index}.")
        self.buffer = buffer
        self.index = index

    @property
    def row(self) -> Tensor:
        """This tensor's statistics: float64 [len(STATISTICS)], a view of the buffer.

        Do not keep it: the buffer moves when it grows.
        """
        return self.buffer.storage[self.index]

    @property
    def block_row(self) -> Tensor:
        """This tensor's block statistics: float64 [len(BLOCK_STATISTICS)], a view of the buffer."""
        return self.buffer.block_storage[self.index]

    @property
    def sample_row(self) -> Tensor | None:
        """This tensor's sample: float64 [SAMPLE_SIZE], a view; None while the buffer is not sampling."""
        buffer = self.buffer
        if not buffer.sampling or buffer.sample_storage is None:
            return None
        return buffer.sample_storage[self.index]

    @property
    def info(self) -> TensorInfo:
        return self.buffer.catalogue[self.index]


class Pace:
    """The pace of reading tensors that are not quantised, and the time that it has taken.

    Several buffers may share one. Set `observing` between two steps; FP8 layers count in every step
    regardless. `seconds` and `calls` grow with every hook that has read tensors: host time, on the threads of
    the training. While `events` is a list, observers on an accelerator append a pair of events around each
    of their reads.
    """

    __slots__ = ("calls", "events", "observing", "seconds")

    def __init__(self) -> None:
        self.observing = True
        self.seconds = 0.0
        self.calls = 0
        self.events: list[tuple[Event, Event]] | None = None


class StatisticsBuffer:
    """Statistics of many tensors: float64 [tensors, len(STATISTICS)], preallocated on one device.

    Rows accumulate within a step (gradient accumulation, tied weights, several calls): `numel` and the counts
    add up, `amax` is the maximum, and `scale` is the last one used, or the median where each block has its
    own. A tensor that a step did not touch has `numel` 0. Call `zero_()` after a step has been collected.
    Float64 holds counts exactly up to 2^53.
    """

    def __init__(self, capacity: int = 256, device: torch.device | str = "cpu") -> None:
        if not 1 <= capacity <= MAX_TENSORS:
            raise ValueError(f"capacity must be from 1 to {MAX_TENSORS}, got {capacity}.")
        self.capacity = capacity
        """The number of tensors that memory is allocated for."""
        # Here and below: tensors made in inference mode cannot be written to after it.
        with torch.inference_mode(False):
            self.storage = torch.zeros(capacity, len(STATISTICS), dtype=torch.float64, device=device)
            self.block_storage = self.storage.new_zeros(capacity, len(BLOCK_STATISTICS))
        self.sample_storage: Tensor | None = None
        self.pace = Pace()
        self.generation = 0
        """Increases whenever the rows are cleared or exchanged."""
        self._sampling = False
        self._sampled = False
        self._catalogue: list[TensorInfo] = []
        self._names: dict[str, int] = {}
        self._spare: list[tuple[int, Tensor]] = []
        """Cleared storages, each with the capacity that it was made for."""

    @property
    def catalogue(self) -> tuple[TensorInfo, ...]:
        """The tensors in the order of their rows; entries are only ever appended."""
        return tuple(self._catalogue)

    @property
    def data(self) -> Tensor:
        """The rows in use: float64 [len(catalogue), len(STATISTICS)], a view."""
        return self.storage[: len(self._catalogue)]

    @property
    def block_data(self) -> Tensor:
        """The same rows' block statistics: float64 [len(catalogue), len(BLOCK_STATISTICS)], a view."""
        return self.block_storage[: len(self._catalogue)]

    @property
    def sample_data(self) -> Tensor | None:
        """The same rows' samples: float64 [len(catalogue), SAMPLE_SIZE], a view; None before the first."""
        return None if self.sample_storage is None else self.sample_storage[: len(self._catalogue)]

    @property
    def sampling(self) -> bool:
        """Return whether samples are taken too: quantisation error and exponents. Set it for single steps.

        Memory for samples is allocated when this is first set.
        """
        return self._sampling

    @sampling.setter
    def sampling(self, value: bool) -> None:
        if value and self.sample_storage is None:
            with torch.inference_mode(False):
                self.sample_storage = self.storage.new_zeros(self.capacity, SAMPLE_SIZE)
        self._sampling = value
        self._sampled |= value

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def __len__(self) -> int:
        return len(self._catalogue)

    def register(self, name: str, *, format: Format | None, shape: tuple[int, ...], role: str) -> Slot:
        """Reserve a row for the tensor `name`, growing the buffer if it is full.

        `format` is None for a tensor that is not quantised; the catalogue then has the empty string. The same
        name gets the same row again. Raises ValueError if it is registered with another role.
        """
        if not name:
            raise ValueError("A tensor needs a name, such as 'blocks.0.mlp.up.weight'.")
        position = self._names.get(name)
        if position is not None:
            if self._catalogue[position].role != role:
                raise ValueError(f"{name!r} is already registered as {self._catalogue[position].role}.")
            return Slot(self, position)
        index = len(self._catalogue)
        if index == self.capacity:
            self._grow()
        module = name.removesuffix(f".{role}") if name.endswith(f".{role}") else ""
        numel = 1
        for size in shape:
            numel *= max(size, 0)
        self._catalogue.append(
            TensorInfo(
                name=name,
                module=module,
                role=role,
                format=format.name if format else "",
                shape=tuple(shape),
                numel=numel,
            )
        )
        self._names[name] = index
        return Slot(self, index)

    def zero_(self) -> None:
        """Start the next step."""
        self.generation += 1
        self.storage.zero_()
        self.block_storage.zero_()
        # Samples are forty times as large as the rest: clear them only if they may have been written to.
        if self.sample_storage is not None and self._sampled:
            self.sample_storage.zero_()
            self._sampled = self._sampling

    def exchange(self) -> Tensor:
        """Start the next step on cleared memory. Returns this step's storage; pass it to `recycle` when done.

        On a CPU this is cheaper than copying the rows and `zero_`, because the thread that recycles does the
        clearing. Block statistics and samples are not touched.
        """
        self.generation += 1
        filled = self.storage
        rows, spare = self._spare.pop() if self._spare else (0, filled)
        # A storage from before the buffer grew is too small.
        if rows != self.capacity:
            with torch.inference_mode(False):
                spare = torch.zeros_like(filled)
        self.storage = spare
        return filled

    def recycle(self, storage: Tensor) -> None:
        """Clear a storage that `exchange` returned, for a later one. May be called from any thread.

        Raises ValueError for any other tensor, because kernels write to rows by their address.
        """
        own = self.storage
        if storage.shape[1:] != own.shape[1:] or storage.dtype != own.dtype or storage.device != own.device:
            raise ValueError("recycle takes a storage that exchange has returned, got another tensor.")
        if len(self._spare) < MAX_SPARE:
            self._spare.append((len(storage), storage.zero_()))

    def _grow(self) -> None:
        if self.capacity >= MAX_TENSORS:
            raise ValueError(f"A statistics buffer holds at most {MAX_TENSORS} tensors.")
        capacity = min(2 * self.capacity, MAX_TENSORS)
        self.storage = _grown(self.storage, capacity)
        self.block_storage = _grown(self.block_storage, capacity)
        if self.sample_storage is not None:
            self.sample_storage = _grown(self.sample_storage, capacity)
        self.capacity = capacity


def _grown(storage: Tensor, rows: int) -> Tensor:
    with torch.inference_mode(False):
        grown = storage.new_zeros(rows, storage.shape[1])
    grown[: storage.shape[0]] = storage
    return grown
