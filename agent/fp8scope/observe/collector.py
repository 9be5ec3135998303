"""Collects the statistics of a step with one asynchronous copy per device, without waiting.

Torch is imported when a model is watched, so that a program without torch can log scalars.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8scope.observe.budget import HOOK_SECONDS, TimeBudget
from fp8scope.observe.snapshot import Copied, HostBuffers, PlainSnapshot, Snapshot
from fp8scope.scalars import host_number

if TYPE_CHECKING:
    import torch

    from fp8scope.observe.tensors import StatisticsTable, StatisticsTables, TensorSource, Watching
    from fp8scope_kernels import TensorInfo

DEFAULT_EVERY = 100
SHORT_SAMPLED = 10
"""Short steps are sampled so many times less often, unless the script sets `every`."""
TENSOR_BYTES = 64
"""Bytes of a tensor's statistics in an unsampled step."""


def _ignore(kind: str, error: Exception) -> None:
    """Ignore errors: the default of a collector."""


class Collector:
    """Owns the tables that watched models write to. One in `every` steps is sampled; 0: none.

    `on_error` is called with exceptions of the sources, which never reach the training.
    """

    def __init__(
        self, on_error: Callable[[str, Exception], None] = _ignore, budget: TimeBudget | None = None
    ) -> None:
        self.recipe: Mapping[str, Any] = {}
        self.every = DEFAULT_EVERY
        self.on_error = on_error
        self.sampled = False
        """Whether the current step is sampled."""
        self._budget = budget or TimeBudget(None)
        self._paced = False
        """Whether there are plain tensors, which the budget limits."""
        self._tables: StatisticsTables | None = None
        self._sources: dict[tuple[int, int, str], TensorSource] = {}
        self._always: Sequence[TensorSource] = ()
        """The sources that have work at the end of every step."""
        self._announced = 0
        self._pool = HostBuffers()

    def watch(self, model: "torch.nn.Module", optimizer: Any = None, how: "Watching | None" = None) -> int:
        """Observe the model; returns the number of observed tensors."""
        from fp8scope.observe.tensors import StatisticsTables, Watching, sources_of

        if self._tables is None:
            self._tables = StatisticsTables()
        tensors = 0
        # Identify the model by a parameter: a wrapper may be freed and its id be reused.
        own, training = id(next(model.parameters(), model)), id(optimizer)
        for make in sources_of(model, optimizer, self._tables, how or Watching(), self._reporter()):
            try:
                source = make()
            except Exception as error:
                self.on_error("watching the model", error)
                continue
            if source.tensors or hasattr(source, "close"):
                kind = type(source).__name__
                self._sources[own, training if kind == "OptimizerState" else 0, kind] = source
                self.recipe = self.recipe or source.recipe
                tensors += source.tensors
        self._always = [source for source in self._sources.values() if source.every_step]
        self._paced = any(getattr(source, "is_paced", False) for source in self._sources.values())
        self._budget.has_readings = self._paced
        self._tables.place()
        self._tables.sample(self.sampled)
        return tensors

    @property
    def needs_each_step(self) -> bool:
        """Return whether what is counted of a step must be collected before the next one begins.

        Not so for FP8 layers, whose counters add up: then a step has what was counted since the last one.
        """
        return any(
            (source.recipe and not getattr(source, "adds_up", False))
            or getattr(source, "counts_itself", False)
            for source in self._sources.values()
        )

    @property
    def counts_always(self) -> bool:
        """Return whether FP8 layers count in every step."""
        return any(getattr(source, "adds_up", False) for source in self._sources.values())

    def rest(self) -> None:
        """Read nothing from now on, until `begin`. What was read belongs to the step that has not ended."""
        if self._paced and self._tables is not None:
            pace, hooks = self._tables.pace, self._tables.reading_hooks
            pace.observing = False
            if hooks.is_on:
                began = perf_counter()
                hooks.set(False)
                pace.seconds += perf_counter() - began

    def next_sampled(self, number: int) -> int | None:
        """Return the first sampled step from `number` on; None if there is none."""
        return number + (1 - number) % self._sampled_every if self.every > 0 else None

    @property
    def _sampled_every(self) -> int:
        # A sampled step takes several milliseconds.
        is_default = self.every == DEFAULT_EVERY
        return self.every * SHORT_SAMPLED if is_default and self._budget.is_short else self.every

    def note_attention(
        self, path: str, query: "torch.Tensor", key: "torch.Tensor", scale: float | None
    ) -> None:
        """Note the bound of the attention logits of `path`, if this is a sampled step of a watched model."""
        if self.sampled and self._tables is not None:
            from fp8scope.observe.tensors import note_logits

            note_logits(self._tables, path, query, key, scale)

    def note_experts(self, path: str, chosen: "torch.Tensor", experts: int) -> None:
        """Note the load of the experts of `path`, if this is a sampled step of a watched model."""
        if self.sampled and self._tables is not None:
            from fp8scope.observe.tensors import note_load

            note_load(self._tables, path, chosen, experts)

    def close(self) -> None:
        """Remove everything from models and optimizers that costs time."""
        for source in self._sources.values():
            close = getattr(source, "close", None)
            if close is not None:
                close()
        if self._tables is not None:
            self._tables.close()
        self._sources.clear()
        self._always = ()
        self._paced = False

    def begin(self, number: int) -> None:
        """Called when step `number` begins. Step 1 and every `every` steps after that are sampled."""
        sampled = self.every > 0 and (number - 1) % self._sampled_every == 0
        if sampled != self.sampled:
            self.sampled = sampled
            if self._tables is not None:
                self._tables.sample(sampled)
        if self._tables is not None:
            self._budget.begin(number, sampled, self._tables.pace)
            if self._paced:
                self._switch_hooks(self._tables)

    def _switch_hooks(self, tables: "StatisticsTables") -> None:
        """Register the hooks that read plain tensors if this step is read, and count what hooks take."""
        pace, hooks = tables.pace, tables.reading_hooks
        if hooks.is_on != pace.observing:
            began = perf_counter()
            hooks.set(pace.observing)
            pace.seconds += perf_counter() - began
        idle = len(hooks) if hooks.is_on and not pace.observing else 0
        if tables.sampling_hooks.is_on and not self.sampled:
            idle += len(tables.sampling_hooks)
        self._budget.fixed_seconds += HOOK_SECONDS * idle

    def new_tensors(self) -> "tuple[int, Sequence[TensorInfo], Sequence[str]] | None":
        """Return the tensors that are new since the last call: offset, entries, names of the statistics."""
        tables = self._tables
        if tables is None or (tables.is_placed() and len(tables.catalogue) == self._announced):
            return None
        from fp8scope_kernels import STATISTICS

        tables.place()
        offset = self._announced
        entries = tables.catalogue[offset:]
        self._announced = offset + len(entries)
        return (offset, entries, STATISTICS) if entries else None

    def described(self) -> tuple[list[str], list[str]]:
        """The names of all tensors in the order of the rows, and those of their statistics."""
        if self._tables is None:
            return [], []
        from fp8scope_kernels import STATISTICS

        return [tensor.name for tensor in self._tables.catalogue], list(STATISTICS)

    @property
    def row_bytes(self) -> int:
        """The approximate memory of one step."""
        return 1024 + (TENSOR_BYTES * len(self._tables.catalogue) if self._tables is not None else 0)

    def discard(self) -> None:
        """Discard what was counted since the last snapshot."""
        for table in self._active():
            table.clear()

    def after_fork(self) -> None:
        """In a forked child, announce the tensors again. Copies may still write to the old buffers."""
        self._announced = 0
        self._pool = HostBuffers()

    def snapshot(self, scalars: "Mapping[str, torch.Tensor]") -> Snapshot | PlainSnapshot | None:
        """Start the copy of the statistics and of the scalars that are on a device, and zero the statistics.

        None when there is nothing to copy. Nothing here waits for the device.
        """
        for source in self._sources.values() if self.sampled else self._always:
            self._finish(source)
        tables = self._tables
        if tables is not None:
            self._budget.end(self.sampled, tables.pace)
        if tables is not None and tables.plain is not None and not (scalars or self.sampled):
            return PlainSnapshot(tables.plain)
        try:
            copies = [
                self._copy(device, tables, {n: x for n, x in scalars.items() if x.device == device})
                for device, tables in self._by_device(scalars).items()
            ]
            return Snapshot(copies, self.sampled) if copies else None
        finally:
            self.discard()

    def copies(self, scalars: "Mapping[str, torch.Tensor]") -> Snapshot | None:
        """Start the copy of scalars that are on a device, and leave the statistics; None without scalars."""
        devices = {value.device for value in scalars.values()}
        if not devices:
            return None
        return Snapshot(
            [
                self._copy(device, (), {n: x for n, x in scalars.items() if x.device == device})
                for device in devices
            ]
        )

    def _active(self) -> "Iterator[StatisticsTable]":
        """Yield the tables that this step writes to."""
        for table in self._tables.all if self._tables is not None else ():
            if table.every_step or self.sampled:
                yield table

    def _by_device(
        self, scalars: "Mapping[str, torch.Tensor]"
    ) -> "dict[torch.device, list[StatisticsTable]]":
        by_device: dict[torch.device, list[StatisticsTable]] = {}
        for table in self._active():
            if len(table.positions):
                by_device.setdefault(table.buffer.device, []).append(table)
        for value in scalars.values():
            by_device.setdefault(value.device, [])
        return by_device

    def _copy(
        self,
        device: "torch.device",
        tables: "Sequence[StatisticsTable]",
        scalars: "Mapping[str, torch.Tensor]",
    ) -> Copied:
        rows = [(table, len(table.positions)) for table in tables]
        if device.type == "cpu":
            parts = [part.numpy().ravel() for table in tables for part in table.parts()]
            parts += [np.array([host_number(value)]) for value in scalars.values()]
            host = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
            return Copied(tables=rows, names=tuple(scalars), host=host, size=len(host))
        import torch

        tensors = [part.reshape(-1) for table in tables for part in table.parts()]
        # Convert to float64 on the device: it represents every number that can be logged.
        tensors += [value.reshape(1).double() for value in scalars.values()]
        together = torch.cat(tensors)
        names, size = tuple(scalars), together.numel()
        from fp8scope_kernels import devices

        # A blocking event lets the recorder sleep instead of spinning.
        event = devices.new_event(device, timing=False) if devices.can_pin(device) else None
        if event is None:
            return Copied(tables=rows, names=names, host=together.to("cpu"), size=size)
        pinned = self._pool.take(size)
        pinned[:size].copy_(together, non_blocking=True)
        devices.record(event, device)
        return Copied(
            tables=rows, names=names, host=pinned, size=size, event=event, give_back=self._pool.give_back
        )

    def _finish(self, source: "TensorSource") -> None:
        try:
            source.finish(self.sampled)
        except Exception as error:
            self.on_error("watching a step", error)

    def _reporter(self) -> Callable[[Exception], None]:
        """Return the error callback for hooks in a model, which must not keep the run alive."""
        me = weakref.ref(self)

        def report(error: Exception) -> None:
            collector = me()
            if collector is not None:
                collector.on_error("watching a tensor", error)

        return report
