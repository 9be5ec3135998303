"""Keep the agent's exceptions out of the training code, and count its failures.

Only `Exception` is caught: KeyboardInterrupt and SystemExit belong to the user and propagate.
"""

import logging
import os
import sys
import threading
from types import TracebackType

MAX_WARNINGS = 100
"""Distinct warnings per run: the names in them may be unbounded."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

logger = logging.getLogger("fp8scope")


def configure_logging() -> None:
    """Log the agent's messages to stderr unless the program configures logging itself.

    The level is FP8SCOPE_LOG_LEVEL, or the level that the program has set on the logger `fp8scope`. The
    default is INFO, even if the root logger shows only warnings.
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
    """Log a failure of the agent that happened before any run began. The next run counts it."""
    logger.warning("%s failed (%s: %s).", kind, type(exception).__name__, exception)
    if len(_early) < MAX_EARLY:
        _early.append((kind, exception))


class Guard:
    """Counts what the agent of this process lost or failed to do, and warns once per kind of problem.

    `errors`: exceptions of the agent itself, and arguments it could not use. `dropped`: rows (steps) that
    fitted neither on disk nor in memory. `refused`: messages that the server rejected for good.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start counting from zero. The lock is new: a forked child may have inherited a held one."""
        self.errors = 0
        self.dropped = 0
        self.refused = 0
        self._warned: set[str] = set()
        # Reentrant: a signal handler may count something while the interrupted code holds the lock.
        self._lock = threading.RLock()
        self._dropped_before = self._errors_before = 0

    def take_early(self) -> None:
        """Count the failures that `before_any_run` has logged."""
        while _early:
            kind, exception = _early.pop()
            with self._lock:
                self.errors += 1
            logger.debug("%s failed", kind, exc_info=exception)

    def shield(self, kind: str) -> "Shield":
        """Return a context manager that catches, counts and logs the exceptions of the agent's own code.

        The warning appears once per kind and type of exception.
        """
        return Shield(self, kind)

    def error(self, kind: str, message: str, exception: Exception | None = None) -> None:
        """Count an error of the agent; warn the first time for this kind and type of exception."""
        with self._lock:
            self.errors += 1
        key = f"error {kind} {type(exception).__name__ if exception else message}"
        text = "%s failed (%s). Training continues; further failures of this kind are only counted."
        self.warn_once(key, text, kind, message)
        if exception is not None:
            logger.debug("%s failed", kind, exc_info=exception)

    def caught(self, kind: str, exception: Exception) -> None:
        """Count an exception. For code on the hot path, where `shield` is too slow: call it in `except`."""
        self.error(kind, f"{type(exception).__name__}: {exception}", exception)

    def drop(self, rows: int, why: str) -> None:
        """Count rows that are permanently lost."""
        with self._lock:
            self.dropped += rows
        self.warn_once(f"drop {why}", "steps are being dropped: %s. The run's page shows how many.", why)

    def counts(self) -> tuple[int, int]:
        """Rows dropped and errors since `begin_writer`."""
        return self.dropped - self._dropped_before, self.errors - self._errors_before

    def begin_writer(self) -> None:
        """Start the counts of a new writer; the server adds them to those of the previous writers."""
        with self._lock:
            self._dropped_before, self._errors_before = self.dropped, self.errors

    def refuse(self) -> None:
        """Count a message that the server rejected for good."""
        with self._lock:
            self.refused += 1

    def warn_once(self, key: str, message: str, *arguments: object) -> None:
        """Log a warning the first time `key` occurs."""
        if self.is_first(key):
            logger.warning(message, *arguments)

    def is_first(self, key: str) -> bool:
        """Return whether `key` occurs for the first time and the limit of warnings is not reached."""
        with self._lock:
            if key in self._warned or len(self._warned) >= MAX_WARNINGS:
                return False
            self._warned.add(key)
        return True

    def forget(self, key: str) -> None:
        """Allow another warning for `key`: the problem had been resolved in between."""
        with self._lock:
            self._warned.discard(key)


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
