"""Background threads that do one thing again and again, and what is called when the process forks."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable

from fp8scope.guard import Guard

AFTER_AN_ERROR = 1.0


class WakeEvent:
    """Wakes one thread. Setting it costs a tenth of setting a `threading.Event`; steps do so as they end."""

    __slots__ = ("_unset",)

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or the next one that would."""
        if self._unset.locked():
            # Two concurrent wake-ups are one wake-up.
            with contextlib.suppress(RuntimeError):
                self._unset.release()

    def wait(self, seconds: float) -> None:
        """Wait until it is set, at most `seconds`, and clear it."""
        self._unset.acquire(timeout=seconds)


class Worker:
    """Calls `tick` until told to stop. `tick` returns the seconds to wait until it wants to be called again.

    The thread is a daemon: it never keeps the interpreter alive. An exception in `tick` is counted, and after
    a pause the thread goes on.
    """

    def __init__(
        self, name: str, tick: Callable[[], float], guard: Guard, at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._tick = tick
        self._at_end = at_end
        self._guard = guard
        self._name = name
        self._wake = WakeEvent()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fp8scope-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Call `tick` now instead of later."""
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end after the `tick` it is in."""
        self._stop.set()
        self._wake.set()

    def has_ended(self) -> bool:
        """Whether `tick` will not be called again."""
        return self._ended.is_set()

    def join(self, deadline: float) -> bool:
        """Wait for the thread's end until `deadline` (`time.monotonic`); whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = AFTER_AN_ERROR
            with self._guard.shield(f"the {self._name} thread"):
                pause = self._tick()
            if pause > 0:
                self._wake.wait(pause)
        self._ended.set()
        with self._guard.shield(f"the end of the {self._name} thread"):
            self._at_end()


# A module that is reloaded, as notebooks do, keeps what it knows of the objects that are there.
_reloaded = "_after_fork" in globals()
_after_fork: "list[weakref.WeakMethod[Callable[[], None]]]" = _after_fork if _reloaded else []  # noqa: F821


def call_after_fork(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child, as long as its object lives. Threads do not survive a fork,
    and open files belong to the parent.
    """
    _after_fork[:] = [known for known in _after_fork if known() is not None]
    _after_fork.append(weakref.WeakMethod(method))


def _after_fork_in_child() -> None:
    for reference in list(_after_fork):
        method = reference()
        if method is not None:
            method()


if hasattr(os, "register_at_fork") and not _reloaded:
    os.register_at_fork(after_in_child=_after_fork_in_child)
