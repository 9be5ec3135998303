"""The run that a logger takes part in, and the capture that takes its values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fp8scope.capture import active
from fp8scope.capture.capture import ValueCapture
from fp8scope.process.open_runs import current_run
from fp8scope.unrecorded import UnrecordedRun

if TYPE_CHECKING:
    from fp8scope.run import Run


@dataclass(frozen=True)
class Joined:
    """A run that values are recorded in.

    Attributes:
        run: the run; None where `fp8scope run` begins it with the training.
        owns: whether the logger has begun it, and ends it.
    """

    run: "Run | None"
    capture: ValueCapture
    owns: bool

    @property
    def recorded(self) -> "Run | None":
        """Return the run, also if the capture has begun it since."""
        return self.run or self.capture.run


def join(begin: "Callable[[], Run]") -> Joined:
    """Take part in the run that this process records, by `fp8scope.attach`, `init` or `fp8scope run`.

    Without one, `begin` begins it.
    """
    capture, run = active.current(), cast("Run | None", current_run())
    if run is None and capture is not None:
        return Joined(capture.run, capture, owns=False)
    owns = run is None
    return joined_to(begin() if run is None else run, owns=owns)


def joined_to(run: Any, *, owns: bool = False) -> Joined:
    """Take part in this run. What stands for a run that cannot be recorded takes no values."""
    is_recorded = not isinstance(run, UnrecordedRun)
    return Joined(run, active.capture_of(run) if is_recorded else ValueCapture(), owns)
