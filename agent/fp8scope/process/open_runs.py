"""The runs that are open in this process, and what becomes of them when it ends."""

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Protocol

from fp8scope.guard import Guard
from fp8scope.process import sigterm, sys_exit

EXIT_SECONDS = 10.0
"""How long the interpreter's exit may be held up by runs that nobody finished."""
NEXT_SECONDS = 5.0
"""How long a notebook's next run may be held up by the one before."""
TERMINATED = (
    "The process was told to end by SIGTERM: preempted, at its time limit, or by torchrun because another"
    " rank had failed."
)


class OpenSession(Protocol):
    """Records an open run: `fp8scope.session.session.Session`."""

    guard: Guard

    @property
    def follower(self) -> object:
        """What finds the steps of the training loop, if anything does."""

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


# A module that is reloaded, as notebooks do, keeps what it knows of this process.
live_runs: "list[OpenRun]" = globals().get("live_runs", [])
"""The runs that were not finished, oldest first."""


@dataclass(frozen=True)
class Exit:
    """The last call of `sys.exit` with a status that is a failure."""

    why: str
    outermost: FrameType
    """Where the program is left, should it end by this."""
    steps: dict[OpenRun, int]
    """The step at which each run was: one that has made another since goes on in spite of it."""


_exit: Exit | None = globals().get("_exit")
_hooks_lock = threading.Lock()
_hooks_installed: bool = globals().get("_hooks_installed", False)


def current_run() -> OpenRun | None:
    """The run that was begun last and is not finished."""
    return live_runs[-1] if live_runs else None


def install_hooks() -> None:
    """Finish open runs when the program ends, as failed when an exception or SIGTERM ended it."""
    global _hooks_installed
    with _hooks_lock:
        if not _hooks_installed:
            _hooks_installed = True
            atexit.register(_at_exit)
            sys.excepthook = _note_uncaught(sys.excepthook)
            threading.excepthook = _note_thread(threading.excepthook)
            sigterm.install(_terminate, _write_out, _note)
            sys_exit.install(_note_exit)
            _watch_notebook()


def is_interactive() -> bool:
    """Whether somebody types at an interpreter, or runs cells of a notebook."""
    return hasattr(sys, "ps1")


def finish_previous() -> None:
    """In an interactive session, where the cell that begins a run is called again, end the one before."""
    if not is_interactive():
        return
    for run in list(live_runs):
        logging.getLogger("fp8scope").info("finishing run %s: a new one begins.", run.name)
        run.session.drop_callbacks()
        run.finish(NEXT_SECONDS)


def _at_exit() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    _blame_exit()
    for run in list(live_runs):
        run.session.drop_callbacks()
        run.finish(max(0.5, deadline - time.monotonic()))


def _note(error: BaseException) -> None:
    for run in list(live_runs):
        run.session.note_failure(error)


def _note_uncaught(previous: Callable[..., object]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _note(error)
        previous(kind, error, trace)

    return hook


def _note_thread(previous: Callable[[Any], object]) -> Callable[[Any], None]:
    """A thread that dies ends the runs that it trains, and no others."""

    def hook(arguments: Any) -> None:
        for run in list(live_runs):
            if run.session.thread == threading.get_ident() and arguments.exc_value is not None:
                run.session.note_failure(arguments.exc_value)
        previous(arguments)

    return hook


def _note_exit(error: SystemExit, frame: FrameType) -> None:
    """The main thread calls for the program's end. Other threads end themselves only: see `_note_thread`."""
    global _exit
    if threading.current_thread() is not threading.main_thread():
        return
    _exit = None
    try:
        if live_runs and sys_exit.exit_status(error.code):
            steps = {run: run.session.step for run in live_runs}
            _exit = Exit(sys_exit.told_from(error, frame), sys_exit.outermost(frame), steps)
    except Exception as ours:
        for run in list(live_runs):
            run.session.guard.caught("noting an exit", ours)


def _blame_exit() -> None:
    """Have the runs failed that `sys.exit` has ended, where nothing else did."""
    if _exit is not None and sys_exit.was_left_by_exception(_exit.outermost):
        for run, step in _exit.steps.items():
            if run.session.step == step:
                run.session.note_exit(_exit.why)


def _watch_notebook() -> None:
    """IPython shows a cell's exception itself, and goes on."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.events.register("post_run_cell", _note_cell)


def _note_cell(result: Any) -> None:
    error = getattr(result, "error_in_exec", None)
    if isinstance(error, BaseException):
        _note(error)


def _terminate(patience: float) -> None:
    deadline = time.monotonic() + patience
    for run in list(live_runs):
        # By itself: what fails for one must not keep the others from their end.
        with run.session.guard.shield("ending the run"):
            run.session.terminate(TERMINATED, max(0.5, deadline - time.monotonic()))


def _write_out() -> None:
    for run in list(live_runs):
        run.session.write_out()
