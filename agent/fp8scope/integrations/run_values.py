"""Values, configuration and the end of a run, for the loggers of frameworks."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import fp8scope
from fp8scope.capture.joining import Joined, join, joined_to
from fp8scope.config import ConfigurationError
from fp8scope.process.open_runs import current_run

if TYPE_CHECKING:
    from fp8scope.run import Run

MAX_WAITING = 5000
"""Entries of the configuration that are kept until the run begins."""


class RunValues:
    """Records what a framework gives to its loggers, in one run of this process.

    The run is `run`, else the one that `fp8scope.attach`, `init` or `fp8scope run` records here. Without one,
    the first value begins a run with `arguments` as for `fp8scope.init`; `finish` ends only such a run.

    Values belong to the step that is open in an attached run, and the framework's own step is recorded beside
    it as `tracker_step/<framework>`. In other runs the framework counts the steps. A value that arrives by
    another route as well is recorded once: see docs/capture.md.

    Raises ConfigurationError if `fp8scope.init` has no such argument.
    """

    def __init__(self, framework: str, run: "Run | None" = None, **arguments: Any) -> None:
        self._framework = framework
        self.arguments = arguments
        self._joined: Joined | None = None if run is None else joined_to(run)
        self._config: dict[str, Any] = {}
        unknown = arguments.keys() - inspect.signature(fp8scope.init).parameters.keys()
        if unknown:
            raise ConfigurationError(
                f"{framework}: fp8scope.init has no argument {', '.join(sorted(unknown))}; "
                f"it has {', '.join(inspect.signature(fp8scope.init).parameters)}."
            )

    @property
    def run(self) -> "Run | None":
        """The run that values go to, if it has begun and goes on."""
        run = None if self._joined is None else self._joined.recorded
        return None if run is None or run.finished else run

    def begin(self) -> "Run | None":
        """Return the run, which begins if this process records none. None if a training is waited for."""
        return self._join().recorded

    def use(self, run: "Run") -> None:
        """Record in this run from now on."""
        self._joined = joined_to(run)
        self._hand_over()

    def log(self, values: Mapping[str, Any], step: Any = None) -> None:
        """Record the numbers among `values`. `step`: the framework's own.

        Raises ConfigurationError if the run cannot begin with the arguments given, and nothing else.
        """
        self._join().capture.take(self._framework, values, step, counts=True)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Add to the run's configuration, now or when it begins."""
        if self._joined is not None:
            self._joined.capture.configure(self._framework, config)
        elif len(self._config) < MAX_WAITING:
            self._config.update(config)

    def finish(self) -> None:
        """End the run, if the logger has begun it."""
        joined = self._joined
        if joined is not None and joined.owns and joined.run is not None:
            joined.run.finish()

    def failed(self, error: BaseException) -> None:
        """Remember that the training failed with `error`."""
        if self.run is not None:
            self.run.session.note_failure(error)

    def _join(self) -> Joined:
        joined = self._joined
        if joined is None or (joined.run is not None and joined.run.finished and current_run() is not None):
            # Another run has begun since: the framework trains again.
            self._joined = joined = join(lambda: fp8scope.init(**self.arguments))
            self._hand_over()
        return joined

    def _hand_over(self) -> None:
        config, self._config = self._config, {}
        if config and self._joined is not None:
            self._joined.capture.configure(self._framework, config)
