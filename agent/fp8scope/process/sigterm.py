"""SIGTERM, as a scheduler sends it before it kills: the run is noted as failed and written out first.

Nothing is done in the signal's handler but to wake a thread. That thread is never inside the code that the
signal interrupted, so it cannot wait for a lock that this code holds; and it works as well when the main
thread is stuck in a collective or a kernel and Python gets no turn there: the handler in C, which always
runs, writes to the thread's pipe. When the runs are written out, the thread lets the default action happen,
so that the exit status is what it would have been: killed by SIGTERM.

Where the program has a handler of its own, that one decides what becomes of the process: runs are written to
the disk, its handler is called, and what it raises is noted and raised.

SIGKILL cannot be seen, and every other signal is left alone.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fp8scope.guard import before_any_run

PATIENCE_SECONDS = 5.0
"""How long writing out and sending may hold up the end; schedulers wait 30 seconds or so before SIGKILL."""

Finisher = Callable[[float], None]
"""Finishes the open runs as failed, within so many seconds."""


class Terminator:
    """SIGTERM's handler, for a process that had none."""

    def __init__(self, finish: Finisher) -> None:
        # A list: a copy of this package that is imported anew finds this handler, and adds its own runs.
        self.finishers = [finish]
        self._owner = os.getpid()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if self._before != -1:
            # An event loop's. Then the handler below does it, whenever Python gets a turn.
            signal.set_wakeup_fd(self._before)
        threading.Thread(target=self._watch, name="fp8scope-signals", daemon=True).start()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                os.write(self._writing, bytes([number]))
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self) -> None:
        while found := os.read(self._reading, 64):
            # Any signal that has a handler in Python is written there; and ours may have been replaced since.
            current: Any = signal.getsignal(signal.SIGTERM)
            if signal.SIGTERM in found and current is self:
                self._end()

    def _end(self) -> None:
        for finish in list(self.finishers):
            # A run counts what fails in its own end (`hooks._terminate`); here nothing is left that could.
            try:
                finish(PATIENCE_SECONDS)
            except Exception as error:
                before_any_run("ending the runs", error)
        # `signal.signal` works on the main thread only, which may be stuck.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(0))
        os.kill(os.getpid(), signal.SIGTERM)

    def after_fork_in_child(self) -> None:
        """The child has no thread to wake, and must not wake its parent's."""
        with contextlib.suppress(ValueError, OSError):
            if signal.getsignal(signal.SIGTERM) is self:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writing):
                signal.set_wakeup_fd(current)
            os.close(self._reading)
            os.close(self._writing)


def chained(previous: Callable[..., Any], write_out: Callable[[], None], note: Any) -> Callable[..., None]:
    """A handler that has everything written to the disk, and calls the program's own."""

    def handler(number: int, frame: FrameType | None) -> None:
        # Not here: the interrupted code may hold the spool's lock.
        threading.Thread(target=write_out, name="fp8scope-signals", daemon=True).start()
        try:
            previous(number, frame)
        except BaseException as error:
            note(error)
            raise

    return handler


def install(finish: Finisher, write_out: Callable[[], None], note: Callable[[BaseException], None]) -> None:
    """Take SIGTERM, once a process; possible on the main thread only, and left alone elsewhere."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        return
    previous: Any = signal.getsignal(signal.SIGTERM)
    if previous is signal.SIG_DFL:
        terminator = Terminator(finish)
        signal.signal(signal.SIGTERM, terminator)
        os.register_at_fork(after_in_child=terminator.after_fork_in_child)
    elif hasattr(previous, "finishers"):
        previous.finishers.append(finish)
    elif callable(previous):
        signal.signal(signal.SIGTERM, chained(previous, write_out, note))
