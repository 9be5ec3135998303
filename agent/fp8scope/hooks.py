"""The runs that are open in this process, and what becomes of them when it ends."""

import atexit
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8scope.run import Run

EXIT_SECONDS = 10.0
"""How long the interpreter's exit may be held up by runs that nobody finished."""

live_runs: "list[Run]" = []
"""The runs that were not finished, oldest first."""


def current_run() -> "Run | None":
    """The run that was begun last and is not finished."""
    return live_runs[-1] if live_runs else None


def _at_exit() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for run in list(live_runs):
        run._callbacks.clear()
        run.finish(max(0.5, deadline - time.monotonic()))


def _note_uncaught(previous: Callable[..., object]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for run in list(live_runs):
            run._note_failure(error)
        previous(kind, error, trace)

    return hook


_hooks_lock = threading.Lock()
_hooks_installed = False


def install_hooks() -> None:
    """Finish open runs at the interpreter's exit, as failed when an exception ended the program."""
    global _hooks_installed
    with _hooks_lock:
        if not _hooks_installed:
            _hooks_installed = True
            atexit.register(_at_exit)
            sys.excepthook = _note_uncaught(sys.excepthook)
