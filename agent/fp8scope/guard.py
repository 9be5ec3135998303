"""Keeps the agent's own exceptions out of the training code, and counts what went wrong.

Only `Exception` is kept: KeyboardInterrupt and SystemExit belong to the user and pass through.
"""

import logging
import os
import sys
import threading
from types import TracebackType

MAX_TOLD = 100
"""Messages of one run: names in them may vary without end."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

logger = logging.getLogger("fp8scope")


def configure_logging() -> None:
    """Show the agent's few messages on stderr, unless the program has set up logging of its own.

    FP8SCOPE_LOG_LEVEL, or the level that the program has given the logger `fp8scope`, says from which level
    on; by default from INFO on, also where the program's own messages begin with warnings.
    """
    wanted = os.environ.get("FP8SCOPE_LOG_LEVEL", "").upper()
    if wanted in LEVELS:
        logger.setLevel(wanted)
    elif logger.level == logging.NOTSET and logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("fp8scope: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


_early: "list[tuple[str, Exception]]" = []
MAX_EARLY = 100


def before_any_run(kind: str, exception: Exception) -> None:
    """Say that something of ours has failed where there is no run yet; the next that begins counts it."""
    logger.warning("%s failed (%s: %s).", kind, type(exception).__name__, exception)
    if len(_early) < MAX_EARLY:
        _early.append((kind, exception))


class Guard:
    """What this process's agent lost or failed at, counted; each kind of trouble is told once.

    `errors`: exceptions of the agent itself and arguments that it could not use. `dropped`: rows (steps) that
    could be kept neither on disk nor in memory. `refused`: messages that the server will never take.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start counting from zero. A forked child does this; its parent may have held the lock."""
        self.errors = 0
        self.dropped = 0
        self.refused = 0
        self._told: set[str] = set()
        # Reentrant: a signal's handler may count something while the interrupted code holds it.
        self._lock = threading.RLock()
        self._dropped_before = self._errors_before = 0

    def take_early(self) -> None:
        """Count what failed before this run was there, and was said then."""
        while _early:
            kind, exception = _early.pop()
            with self._lock:
                self.errors += 1
            logger.debug("%s failed", kind, exc_info=exception)

    def shield(self, kind: str) -> "Shield":
        """Run a block of ours; an exception in it is counted and told once per kind and type."""
        return Shield(self, kind)

    def error(self, kind: str, message: str, exception: Exception | None = None) -> None:
        """Count an error of the agent; tell it the first time for this kind and type of exception."""
        with self._lock:
            self.errors += 1
        key = f"error {kind} {type(exception).__name__ if exception else message}"
        text = "%s failed (%s). Training goes on; further failures of this kind are only counted."
        self.warn_once(key, text, kind, message)
        if exception is not None:
            logger.debug("%s failed", kind, exc_info=exception)

    def caught(self, kind: str, exception: Exception) -> None:
        """As `shield`, for a block that is in every step's way: call it where the exception was caught."""
        self.error(kind, f"{type(exception).__name__}: {exception}", exception)

    def drop(self, rows: int, why: str) -> None:
        """Count rows that are lost for good."""
        with self._lock:
            self.dropped += rows
        self.warn_once(f"drop {why}", "steps are being dropped: %s. They are counted on the run's page.", why)

    def counts(self) -> tuple[int, int]:
        """Rows dropped and errors since `begin_writer`."""
        return self.dropped - self._dropped_before, self.errors - self._errors_before

    def begin_writer(self) -> None:
        """Another writer begins, whose counts the server adds to those of the one before."""
        with self._lock:
            self._dropped_before, self._errors_before = self.dropped, self.errors

    def refuse(self) -> None:
        """Count a message that was set aside."""
        with self._lock:
            self.refused += 1

    def warn_once(self, key: str, message: str, *arguments: object) -> None:
        """Log a warning the first time that `key` comes up."""
        if self.is_first(key):
            logger.warning(message, *arguments)

    def is_first(self, key: str) -> bool:
        """Whether `key` comes up for the first time, and something may still be said."""
        with self._lock:
            if key in self._told or len(self._told) >= MAX_TOLD:
                return False
            self._told.add(key)
        return True

    def forget(self, key: str) -> None:
        """Let `key` be told again: the trouble was over in between."""
        with self._lock:
            self._told.discard(key)


class Shield:
    """See `Guard.shield`."""

    __slots__ = ("_guard", "_kind")

    def __init__(self, guard: Guard, kind: str) -> None:
        self._guard = guard
        self._kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._guard.caught(self._kind, error)
        return True
