"""A run that records nothing, for an environment in which the agent does not work.

It imports nothing that such an environment could break.
"""

import logging
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from fp8scope.recording.finish_report import FinishReport

logger = logging.getLogger("fp8scope")


def unrecorded(error: Exception) -> "UnrecordedRun":
    """Log in one line why the run is not recorded, and return what the script may use in its place."""
    text = " ".join(str(error).split())[:300]
    logger.warning(
        "this run is not recorded, because the agent cannot begin (%s: %s). The training goes on; "
        "`fp8scope doctor` says more.",
        type(error).__name__,
        text,
    )
    logger.debug("the agent cannot begin", exc_info=error)
    return UnrecordedRun()


class UnrecordedRun:
    """Has the methods of `fp8scope.run.Run`; they do nothing."""

    id = url = name = ""
    directory = margin = None
    finished = True
    attempt = 1
    tags: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self._step = 0

    def step(self, tokens: int = 0, *, number: int | None = None) -> "UnrecordedStep":
        """Return a step that keeps its number only."""
        self._step = self._step + 1 if number is None else number
        return UnrecordedStep(self._step, tokens)

    def watch(self, *args: Any, **kwargs: Any) -> int:
        """Watch no tensor."""
        return 0

    def batches(self, source: Iterable[Any]) -> Iterable[Any]:
        """Return the batches as they are."""
        return source

    def state_dict(self) -> dict[str, Any]:
        """Return nothing that a run could be continued from."""
        return {}

    def finish(self, timeout: float = 0.0) -> FinishReport:
        """Return the report of a run that recorded nothing."""
        return FinishReport(complete=False, errors=1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _do_nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let exceptions pass."""


class UnrecordedStep:
    """Has what scripts use of `fp8scope.step.Step`."""

    seconds = 0.0

    def __init__(self, number: int, tokens: int) -> None:
        self.number = number
        self.tokens = tokens

    def log(self, scalars: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Record nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let exceptions pass."""


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a method whose result scripts do not use."""
