"""Hugging Face Accelerate: a tracker for `Accelerator(log_with=Fp8scopeTracker(project="..."))`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.tracking import GeneralTracker

import fp8scope
from fp8scope.integrations.common import scalars_of

if TYPE_CHECKING:
    from fp8scope.run import Run
    from fp8scope.step import Step


class Fp8scopeTracker(GeneralTracker):
    """Records the values of `accelerator.log` as scalars of a run.

    `run` is a run that has already begun, with `fp8scope.attach(model, optimizer)` after
    `accelerator.prepare`: the attachment finds the steps, and values are added to the open step. Without it,
    `init_trackers` starts a run with `arguments` as for `fp8scope.init`, and `log(values, step=n)` records
    step n. Such a run has only the logged values, no tensor statistics.
    """

    name = "fp8scope"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run: "Run | None" = None, **arguments: Any) -> None:
        super().__init__()
        self.run = run
        self._arguments = arguments
        self._step: Step | None = None

    @property
    def tracker(self) -> "Run | None":
        """The run; None before `init_trackers`."""
        return self.run

    def start(self) -> None:
        """Start a run if there is none; called by `init_trackers`."""
        if self.run is None:
            self.run = fp8scope.init(**self._arguments)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add to the run's configuration."""
        if self.run is not None:
            self.run.log_config(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values to the open step of an attached run, else to step `step` (None: to a new step)."""
        run, scalars = self.run, scalars_of(values)
        if run is None or run.finished:
            return
        if run.session.follower is not None:
            run.log(scalars)
            return
        if self._step is not None and step is not None and step == self._step.number:
            self._step.log(scalars)
            return
        self._close()
        self._step = run.step(number=step)
        self._step.__enter__()
        self._step.log(scalars)
        if step is None:
            self._close()

    def finish(self) -> None:
        """Finish the run; called by `accelerator.end_training()`."""
        if self.run is not None:
            self._close()
            self.run.finish()

    def _close(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)
