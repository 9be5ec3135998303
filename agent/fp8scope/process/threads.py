"""A background thread that does one thing again and again, and what happens to it when the process forks."""

import abc
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable

from fp8scope.guard import Guard

AFTER_AN_ERROR = 1.0


class Bell:
    """Wakes one thread. As `threading.Event`, and a tenth of it: rung at the end of training steps."""

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next that would."""
        if self._silent.locked():
            # Rung by two at once is rung.
            with contextlib.suppress(RuntimeError):
                self._silent.release()

    def wait(self, seconds: float) -> None:
        """Until it is rung, `seconds` at most."""
        self._silent.acquire(timeout=seconds)


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
        self._bell = Bell()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fp8scope-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Call `tick` now instead of later."""
        self._bell.ring()

    def stop(self) -> None:
        """Let the thread end after the `tick` it is in."""
        self._stop.set()
        self._bell.ring()

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
                self._bell.wait(pause)
        self._ended.set()
        with self._guard.shield(f"the end of the {self._name} thread"):
            self._at_end()


# A module that is reloaded, as notebooks do, keeps what it knows of the objects that are there.
_reloaded = "_forkable" in globals()
_forkable: "weakref.WeakSet[Forkable]" = _forkable if _reloaded else weakref.WeakSet()  # noqa: F821


class Forkable(abc.ABC):
    """Is told when it finds itself in a forked child, where its threads do not run and its files are not its
    own.
    """

    def __init__(self) -> None:
        _forkable.add(self)

    @abc.abstractmethod
    def after_fork_in_child(self) -> None:
        """Called by the child, right after the fork."""


def _after_fork_in_child() -> None:
    for one in list(_forkable):
        one.after_fork_in_child()


if hasattr(os, "register_at_fork") and not _reloaded:
    os.register_at_fork(after_in_child=_after_fork_in_child)
