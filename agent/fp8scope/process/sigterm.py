"""Handles SIGTERM, which schedulers send before SIGKILL: open runs are marked as failed and written out.

The signal handler only wakes a thread. That thread never runs inside the interrupted code, so it cannot
deadlock on a lock that this code holds. It also runs if the main thread is stuck in a collective or a kernel:
the interpreter's C handler writes to the thread's pipe through `signal.set_wakeup_fd`. When the runs are
written out, the thread restores the default action and raises SIGTERM again, so the exit status is the usual
one.

If the program has its own SIGTERM handler, that handler decides whether the process ends: runs are written to
disk, the handler is called, and an exception that it raises is noted. SIGKILL cannot be handled, and all
other signals are left alone.
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
"""Seconds that writing and sending may delay the end; schedulers wait about 30 seconds before SIGKILL."""

Finisher = Callable[[float], None]
"""Finishes the open runs as failed, within the given number of seconds."""


class Terminator:
    """The SIGTERM handler of a process that had none."""

    def __init__(self, finish: Finisher) -> None:
        # A second import of this package (after its modules were dropped) adds its finisher here.
        self.finishers = [finish]
        self._owner = os.getpid()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if self._before != -1:
            # It belongs to an event loop. Then `__call__` wakes the thread, when Python runs the handler.
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
        while signals := os.read(self._reading, 64):
            # Every signal with a Python handler is written there, and this handler may have been replaced.
            current: Any = signal.getsignal(signal.SIGTERM)
            if signal.SIGTERM in signals and current is self:
                self._end()

    def _end(self) -> None:
        for finish in list(self.finishers):
            try:
                finish(PATIENCE_SECONDS)
            except Exception as error:
                before_any_run("ending the runs", error)
        # Not `signal.signal`: it works on the main thread only, which may be stuck.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(0))
        os.kill(os.getpid(), signal.SIGTERM)

    def after_fork_in_child(self) -> None:
        """Restore the defaults in a forked child: it has no such thread, and must not wake its parent's."""
        with contextlib.suppress(ValueError, OSError):
            if signal.getsignal(signal.SIGTERM) is self:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writing):
                signal.set_wakeup_fd(current)
            os.close(self._reading)
            os.close(self._writing)


def chained(previous: Callable[..., Any], write_out: Callable[[], None], note: Any) -> Callable[..., None]:
    """Return a handler that has the runs written to disk and calls the program's own handler."""

    def handler(number: int, frame: FrameType | None) -> None:
        # On another thread: the interrupted code may hold the lock of the spool.
        threading.Thread(target=write_out, name="fp8scope-signals", daemon=True).start()
        try:
            previous(number, frame)
        except BaseException as error:
            note(error)
            raise

    return handler


def install(finish: Finisher, write_out: Callable[[], None], note: Callable[[BaseException], None]) -> None:
    """Handle SIGTERM from now on. Does nothing outside the main thread, where Python allows no handler."""
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
