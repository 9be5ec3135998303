"""The open runs of this process, and the hooks that finish them when the process ends."""

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Protocol

from fp8scope.guard import Guard
from fp8scope.process import sigterm, sys_exit
from fp8scope.process.patches import Patch

EXIT_SECONDS = 10.0
"""Seconds that unfinished runs may delay the interpreter's exit."""
NEXT_SECONDS = 5.0
"""Seconds that the previous run of a notebook may delay the next one."""
TERMINATED = (
    "The process was terminated by SIGTERM: preempted, at its time limit, or by torchrun because another"
    " rank failed."
)


class OpenSession(Protocol):
    """Records an open run: `fp8scope.session.session.Session`."""

    guard: Guard

    @property
    def follower(self) -> object:
        """Return what finds the steps of the training loop, if anything does."""

    @property
    def step(self) -> int:
        """The number of the step that was begun last."""

    @property
    def thread(self) -> int:
        """The ident of the thread that trains."""

    def note_failure(self, error: BaseException) -> None:
        """Remember that the program failed with `error`."""

    def note_exit(self, why: str) -> None:
        """Remember that the program ended with a failure status."""

    def terminate(self, why: str, timeout: float) -> None:
        """End the run as failed, from another thread than the training's."""

    def write_out(self) -> None:
        """Write and fsync everything that was handed over."""

    def drop_callbacks(self) -> None:
        """Deliver no more alerts."""

    def leave(self) -> None:
        """The program ends: wait little for a server that does not answer."""

    def send_report(self, kind: str, **fields: Any) -> None:
        """Send a report of this kind."""


class OpenRun(Protocol):
    """A run that is being recorded: `fp8scope.run.Run`."""

    @property
    def name(self) -> str:
        """The run's name."""

    @property
    def session(self) -> OpenSession:
        """Records the run."""

    def finish(self, timeout: float = ...) -> Any:
        """End the run."""


live_runs: list[OpenRun] = []
"""The runs that are not finished, oldest first."""


def current_run() -> OpenRun | None:
    """The newest run that is not finished."""
    return live_runs[-1] if live_runs else None


def opened(run: OpenRun) -> None:
    """Called when a run begins."""
    live_runs.append(run)


def closed(run: OpenRun) -> None:
    """Called when a run is finished; restores what the hooks have replaced after the last one."""
    if run in live_runs:
        live_runs.remove(run)
    if not live_runs:
        exit_hooks.restore()


def is_interactive() -> bool:
    """Return whether this is an interactive interpreter or a notebook."""
    return hasattr(sys, "ps1")


def finish_previous() -> None:
    """In an interactive session, finish the open runs: the cell that begins a run was executed again."""
    if not is_interactive():
        return
    for run in list(live_runs):
        logging.getLogger("fp8scope").info("finishing run %s: a new one begins.", run.name)
        run.session.drop_callbacks()
        run.finish(NEXT_SECONDS)


@dataclass(frozen=True)
class Exit:
    """The last call of `sys.exit` with a failure status."""

    why: str
    outermost: FrameType
    """The frame that the exception leaves last if it ends the program."""
    steps: Sequence[tuple[OpenRun, int]]
    """The step of every open run: a run that has recorded another step since was not ended by this call."""


class ExitHooks:
    """Finishes open runs when the program ends; as failed if an exception, `sys.exit` or SIGTERM ended it."""

    def __init__(self, runs: list[OpenRun]) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._patches: list[Patch] = []
        self._last_exit: Exit | None = None
        self._shell: Any = None
        self._handles_sigterm = False

    def install(self) -> None:
        """Install the hooks, if they are not."""
        with self._lock:
            if self._patches:
                return
            self._patches = [
                Patch(sys, "excepthook", self._noting_uncaught),
                Patch(threading, "excepthook", self._noting_thread),
                *sys_exit.install(self.note_exit),
            ]
            atexit.register(self._at_exit)
            if not self._handles_sigterm:
                # Stays for the life of the process: `signal.signal` works on the main thread only.
                self._handles_sigterm = True
                sigterm.install(self.terminate, self._write_out, self._note)
            self._watch_notebook()

    def restore(self) -> None:
        """Restore what `install` replaced, where it is still ours. Without open runs nothing needs it."""
        with self._lock:
            for patch in self._patches:
                patch.restore()
            self._patches.clear()
            self._last_exit = None
            atexit.unregister(self._at_exit)
            if self._shell is not None:
                self._shell.events.unregister("post_run_cell", self._note_cell)
                self._shell = None

    def note_exit(self, error: SystemExit, frame: FrameType) -> None:
        """The program calls `sys.exit`. On other threads than the main one that ends only the thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._last_exit = None
        try:
            if self._runs and sys_exit.exit_status(error.code):
                steps = [(run, run.session.step) for run in self._runs]
                self._last_exit = Exit(sys_exit.format_exit(error, frame), sys_exit.outermost(frame), steps)
        except Exception as ours:
            for run in list(self._runs):
                run.session.guard.caught("noting an exit", ours)

    def terminate(self, patience: float) -> None:
        """Finish the open runs as failed, within `patience` seconds."""
        deadline = time.monotonic() + patience
        for run in list(self._runs):
            # A failure of one run must not keep the others from ending.
            with run.session.guard.shield("ending the run"):
                run.session.terminate(TERMINATED, max(0.5, deadline - time.monotonic()))
                # The hooks stay: the process ends right after this.
                self._runs.remove(run)

    def _at_exit(self) -> None:
        deadline = time.monotonic() + EXIT_SECONDS
        self._blame_exit()
        for run in list(self._runs):
            run.session.drop_callbacks()
            run.session.leave()
            run.finish(max(0.5, deadline - time.monotonic()))

    def _blame_exit(self) -> None:
        """Mark the runs as failed that the last call of `sys.exit` has ended."""
        last = self._last_exit
        if last is not None and sys_exit.was_left_by_exception(last.outermost):
            for run, step in last.steps:
                if run.session.step == step:
                    run.session.note_exit(last.why)

    def _note(self, error: BaseException) -> None:
        for run in list(self._runs):
            run.session.note_failure(error)

    def _noting_uncaught(self, previous: Callable[..., object]) -> Callable[..., None]:
        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._note(error)
            previous(kind, error, trace)

        return hook

    def _noting_thread(self, previous: Callable[..., object]) -> Callable[..., None]:
        """An exception that ends a thread fails the runs that the thread trains, and no others."""

        def hook(arguments: Any) -> None:
            for run in list(self._runs):
                if run.session.thread == threading.get_ident() and arguments.exc_value is not None:
                    run.session.note_failure(arguments.exc_value)
            previous(arguments)

        return hook

    def _watch_notebook(self) -> None:
        """IPython shows the exception of a cell itself, without `sys.excepthook`."""
        self._shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._note_cell)

    def _note_cell(self, result: Any) -> None:
        error = getattr(result, "error_in_exec", None)
        if isinstance(error, BaseException):
            self._note(error)

    def _write_out(self) -> None:
        for run in list(self._runs):
            run.session.write_out()


exit_hooks = ExitHooks(live_runs)
