"""Background threads, and what happens to them when the process forks."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable

from fp8scope.guard import Guard

AFTER_AN_ERROR = 1.0
"""Seconds to wait after an exception in `tick`."""


class WakeEvent:
    """Wakes one thread. Set at the end of every step, so it is ten times faster than `threading.Event`."""

    __slots__ = ("_clear",)

    def __init__(self) -> None:
        self._clear = threading.Lock()
        self._clear.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or make its next `wait` return at once."""
        if self._clear.locked():
            # Two concurrent wake-ups are one wake-up.
            with contextlib.suppress(RuntimeError):
                self._clear.release()

    def wait(self, seconds: float) -> None:
        """Wait until it is set, for at most `seconds`."""
        self._clear.acquire(timeout=seconds)


class Worker:
    """Calls `tick` on a thread until it is stopped. `tick` returns the seconds until its next call.

    The thread is a daemon and never keeps the interpreter alive. An exception in `tick` is counted, and the
    thread continues after a pause.
    """

    def __init__(
        self, name: str, tick: Callable[[], float], guard: Guard, at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._tick = tick
        self._at_end = at_end
        self._guard = guard
        self._name = name
        self._wake_event = WakeEvent()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fp8scope-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Call `tick` now instead of later."""
        self._wake_event.set()

    def stop(self) -> None:
        """End the thread after its current `tick`."""
        self._stop.set()
        self._wake_event.set()

    def has_ended(self) -> bool:
        """Return whether `tick` will not be called again."""
        return self._ended.is_set()

    def join(self, deadline: float) -> bool:
        """Wait until `deadline` (`time.monotonic`) for the thread to end; returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = AFTER_AN_ERROR
            with self._guard.shield(f"the {self._name} thread"):
                pause = self._tick()
            if pause > 0:
                self._wake_event.wait(pause)
        self._ended.set()
        with self._guard.shield(f"the end of the {self._name} thread"):
            self._at_end()


_after_fork: "list[weakref.WeakMethod[Callable[[], None]]]" = []


def call_after_fork(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child, as long as its object lives.

    In the child the parent's threads do not run, and its files belong to the parent.
    """
    _after_fork[:] = [handler for handler in _after_fork if handler() is not None]
    _after_fork.append(weakref.WeakMethod(method))


def _after_fork_in_child() -> None:
    for reference in list(_after_fork):
        method = reference()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
