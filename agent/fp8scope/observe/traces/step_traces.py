"""Traces of chosen steps by torch's profiler (Kineto), as files that Perfetto opens, and as tables.

A trace has every operator, and on an accelerator every kernel. It slows its step down, so steps are chosen
by their numbers. Where a chosen step is not measured, as most short ones, the next measured one is traced.
"""

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8scope.guard import Guard

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fp8scope.observe.traces.layer_ranges import LayerRanges

MAX_TRACES: Final = 16
MAX_TRACE_BYTES: Final = 256 << 20
"""A larger trace, which no browser opens, is deleted."""


class StepTraces:
    """Traces the chosen steps, in the thread that trains."""

    def __init__(
        self,
        steps: Iterable[int],
        guard: Guard,
        path_of: Callable[[int], Path],
        on_written: Callable[[int, Path], None],
        models: "Callable[[], Iterable[nn.Module]]" = tuple,
        on_table: Callable[[int, dict[str, Any]], None] = lambda step, table: None,
    ) -> None:
        """`path_of` names the file of a step; `on_written` is called with each that was written.

        `models`: those whose layers the table lists. `on_table`: called with the document of `time_table`.
        """
        self._waiting = deque(sorted(set(steps))[:MAX_TRACES])
        self._guard = guard
        self._path_of = path_of
        self._on_written = on_written
        self._models = models
        self._on_table = on_table
        self._ranges: LayerRanges | None = None
        self._profile: torch.profiler.profile | None = None
        self._step = 0

    def begins(self, number: int) -> None:
        """Called when a step begins: trace it if it was chosen."""
        if not self._waiting or number < self._waiting[0]:
            return
        while self._waiting and self._waiting[0] <= number:
            self._waiting.popleft()
        self.abandon()
        with self._guard.shield("tracing a step"):
            import torch

            from fp8scope.observe.traces.layer_ranges import LayerRanges

            if torch._C._autograd._profiler_enabled():
                self._guard.warn_once(
                    "traces", "a step is not traced, because the script profiles it itself."
                )
                return
            activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
            profile = torch.profiler.profile(activities=activities)
            profile.start()
            self._profile, self._step = profile, number
            self._ranges = LayerRanges(self._models())

    def ends(self, number: int) -> None:
        """Called when a step has ended: write its trace."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        ranges = self._remove_ranges()
        with self._guard.shield("writing the trace of a step"):
            profile.stop()
            if number != self._step:
                return
            if ranges is not None:
                self._tell_times(profile, ranges)
            path = self._path_of(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
            if path.stat().st_size > MAX_TRACE_BYTES:
                path.unlink()
                self._guard.warn_once("traces", "the trace of step %s was too large to keep.", number)
                return
            self._on_written(number, path)

    def _tell_times(self, profile: "torch.profiler.profile", ranges: "LayerRanges") -> None:
        from fp8scope.observe.traces.time_table import time_table

        with self._guard.shield("adding up the times of a trace"):
            events = profile.events()  # type: ignore[no-untyped-call]
            self._on_table(self._step, time_table(events, ranges.held))

    def _remove_ranges(self) -> "LayerRanges | None":
        ranges, self._ranges = self._ranges, None
        if ranges is not None:
            with self._guard.shield("removing the hooks of a trace"):
                ranges.remove()
        return ranges

    def abandon(self) -> None:
        """Stop a trace whose step was not completed."""
        profile, self._profile = self._profile, None
        self._remove_ranges()
        if profile is not None:
            with self._guard.shield("tracing a step"):
                profile.stop()
