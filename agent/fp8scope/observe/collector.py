"""From the device to the host without waiting: one asynchronous copy per device at the end of a step.

Torch is imported only once there is something to observe; a program without it never imports it here.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8scope.observe.budget import Budget
from fp8scope.observe.snapshot import Copied, HostBuffers, PlainSnapshot, Snapshot
from fp8scope.scalars import host_number

if TYPE_CHECKING:
    import torch

    from fp8scope.observe.tensors import Board, Boards, Source, Watching
    from fp8scope_kernels import TensorInfo

DEFAULT_EVERY = 100
TENSOR_BYTES = 64
"""A tensor's statistics in a step that is not sampled."""


def _ignore(kind: str, error: Exception) -> None:
    """For a collector that nobody listens to."""


class Collector:
    """Owns the boards that watched models write to. `every`: a step in so many is a sampled one; 0: none.

    `on_error` is told what fails in a source; the training never is.
    """

    def __init__(
        self, on_error: Callable[[str, Exception], None] = _ignore, budget: Budget | None = None
    ) -> None:
        self.recipe: Mapping[str, Any] = {}
        self.every = DEFAULT_EVERY
        self.on_error = on_error
        self.sampled = False
        """Whether the step that is under way is a sampled one."""
        self._budget = budget or Budget(None)
        self._paced = False
        """Whether there are plain tensors, which the budget is for."""
        self._boards: Boards | None = None
        self._sources: dict[tuple[int, int, str], Source] = {}
        self._always: Sequence[Source] = ()
        """Those that have something to do at the end of every step."""
        self._announced = 0
        self._pool = HostBuffers()

    def watch(self, model: "torch.nn.Module", optimizer: Any = None, how: "Watching | None" = None) -> int:
        """Let all sources look at the model; returns how many tensors are observed of it."""
        from fp8scope.observe.tensors import Boards, Watching, sources_of

        if self._boards is None:
            self._boards = Boards()
        tensors = 0
        # A wrapper may be gone at once, and its place in memory be taken by another's: its parameters stay.
        own, training = id(next(model.parameters(), model)), id(optimizer)
        for make in sources_of(model, optimizer, self._boards, how or Watching(), self._reporter()):
            try:
                source = make()
            except Exception as error:
                self.on_error("watching the model", error)
                continue
            if source.tensors:
                kind = type(source).__name__
                self._sources[own, training if kind == "TrainingState" else 0, kind] = source
                self.recipe = self.recipe or source.recipe
                tensors += source.tensors
        self._always = [source for source in self._sources.values() if source.every_step]
        self._paced = any(getattr(source, "is_paced", False) for source in self._sources.values())
        self._boards.place()
        self._boards.sample(self.sampled)
        return tensors

    def close(self) -> None:
        """The run is over: nothing is left in models and optimizers that costs anything."""
        for source in self._sources.values():
            close = getattr(source, "close", None)
            if close is not None:
                close()
        self._sources.clear()
        self._always = ()
        self._paced = False

    def begin(self, number: int) -> None:
        """Step `number` begins: is it a sampled one? Step 1 is, and every `every`-th after it."""
        sampled = self.every > 0 and (number - 1) % self.every == 0
        if sampled != self.sampled:
            self.sampled = sampled
            if self._boards is not None:
                self._boards.sample(sampled)
        if self._paced and self._boards is not None:
            self._budget.begin(number, sampled, self._boards.pace)

    def new_tensors(self) -> "tuple[int, Sequence[TensorInfo], Sequence[str]] | None":
        """The catalogue's growth since the last call: offset, entries, and the names of the statistics."""
        boards = self._boards
        if boards is None or (boards.is_placed() and len(boards.catalogue) == self._announced):
            return None
        from fp8scope_kernels import STATISTICS

        boards.place()
        offset = self._announced
        entries = boards.catalogue[offset:]
        self._announced = offset + len(entries)
        return (offset, entries, STATISTICS) if entries else None

    @property
    def row_bytes(self) -> int:
        """About what one step takes in memory."""
        return 1024 + (TENSOR_BYTES * len(self._boards.catalogue) if self._boards is not None else 0)

    def discard(self) -> None:
        """Forget what was counted since the last snapshot."""
        for board in self._active():
            board.clear()

    def after_fork(self) -> None:
        """In a forked child: announce the tensors anew, and use no memory that a copy may still write to."""
        self._announced = 0
        self._pool = HostBuffers()

    def snapshot(self, scalars: "Mapping[str, torch.Tensor]") -> Snapshot | PlainSnapshot | None:
        """Start the copy of the statistics and of the scalars that are on a device, and zero the statistics.

        None when there is nothing to copy. Nothing here waits for the device.
        """
        for source in self._sources.values() if self.sampled else self._always:
            self._finish(source)
        boards = self._boards
        if self._paced and boards is not None:
            self._budget.end(self.sampled, boards.pace)
        if boards is not None and boards.plain is not None and not (scalars or self.sampled):
            return PlainSnapshot(boards.plain)
        try:
            copies = [
                self._copy(device, boards, {n: x for n, x in scalars.items() if x.device == device})
                for device, boards in self._by_device(scalars).items()
            ]
            return Snapshot(copies, self.sampled) if copies else None
        finally:
            self.discard()

    def _active(self) -> "Iterator[Board]":
        """The boards that this step writes to."""
        for board in self._boards.all if self._boards is not None else ():
            if board.every_step or self.sampled:
                yield board

    def _by_device(self, scalars: "Mapping[str, torch.Tensor]") -> "dict[torch.device, list[Board]]":
        found: dict[torch.device, list[Board]] = {}
        for board in self._active():
            if len(board.positions):
                found.setdefault(board.buffer.device, []).append(board)
        for value in scalars.values():
            found.setdefault(value.device, [])
        return found

    def _copy(
        self, device: "torch.device", boards: "Sequence[Board]", scalars: "Mapping[str, torch.Tensor]"
    ) -> Copied:
        rows = [(board, len(board.positions)) for board in boards]
        if device.type == "cpu":
            parts = [part.numpy().ravel() for board in boards for part in board.parts()]
            parts += [np.array([host_number(value)]) for value in scalars.values()]
            host = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
            return Copied(rows, tuple(scalars), host, len(host))
        import torch

        tensors = [part.reshape(-1) for board in boards for part in board.parts()]
        # On the device to float64 first: it holds every number that was logged.
        tensors += [value.reshape(1).double() for value in scalars.values()]
        together = torch.cat(tensors)
        names, size = tuple(scalars), together.numel()
        if device.type != "cuda":
            return Copied(rows, names, together.to("cpu"), size)
        pinned = self._pool.take(size)
        pinned[:size].copy_(together, non_blocking=True)
        # The recorder sleeps on the event instead of spinning.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return Copied(rows, names, pinned, size, event, self._pool.give_back)

    def _finish(self, source: "Source") -> None:
        try:
            source.finish(self.sampled)
        except Exception as error:
            self.on_error("watching a step", error)

    def _reporter(self) -> Callable[[Exception], None]:
        """What hooks in a model call. They must not keep the run alive."""
        me = weakref.ref(self)

        def report(error: Exception) -> None:
            collector = me()
            if collector is not None:
                collector.on_error("watching a tensor", error)

        return report
