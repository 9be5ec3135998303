"""Traces of chosen steps by torch's profiler (Kineto), as files that Perfetto opens.

A trace has every operator, and on an accelerator every kernel. It slows its step down, so steps are chosen
by their numbers. Where a chosen step is not measured, as most short ones, the next measured one is traced.
"""

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fp8scope.guard import Guard

if TYPE_CHECKING:
    import torch

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
    ) -> None:
        """`path_of` names the file of a step; `on_written` is called with each that was written."""
        self._waiting = deque(sorted(set(steps))[:MAX_TRACES])
        self._guard = guard
        self._path_of = path_of
        self._on_written = on_written
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

            if torch._C._autograd._profiler_enabled():
                self._guard.warn_once(
                    "traces", "a step is not traced, because the script profiles it itself."
                )
                return
            activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
            profile = torch.profiler.profile(activities=activities)
            profile.start()
            self._profile, self._step = profile, number

    def ends(self, number: int) -> None:
        """Called when a step has ended: write its trace."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        with self._guard.shield("writing the trace of a step"):
            profile.stop()
            if number != self._step:
                return
            path = self._path_of(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
            if path.stat().st_size > MAX_TRACE_BYTES:
                path.unlink()
                self._guard.warn_once("traces", "the trace of step %s was too large to keep.", number)
                return
            self._on_written(number, path)

    def abandon(self) -> None:
        """Stop a trace whose step was not completed."""
        profile, self._profile = self._profile, None
        if profile is not None:
            with self._guard.shield("tracing a step"):
                profile.stop()
