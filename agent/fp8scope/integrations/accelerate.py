"""Hugging Face Accelerate: a tracker for `Accelerator(log_with=Fp8scopeTracker(project="..."))`.

Once this module is imported, or in `fp8scope run`, `log_with="fp8scope"` does the same.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate import tracking
from accelerate.tracking import GeneralTracker

import fp8scope
from fp8scope.integrations.common import scalars_of
from fp8scope.integrations.run_values import RunValues

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


class NamedTracker(GeneralTracker):
    """Stands for `log_with="fp8scope"`: Accelerate makes it, with the name that `init_trackers` gets.

    Values go to the run that this process records, else to one that begins with the first of them. The
    `init_kwargs` of the name are `run`, and arguments of `fp8scope.init`.
    """

    name = "fp8scope"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, project_name: str, run: "Run | None" = None, **arguments: Any) -> None:
        super().__init__()
        self._values = RunValues("accelerate", run, **arguments)
        # Not the project of fp8scope, to which a token belongs.
        self._values.configure({"accelerate": {"project": project_name}})

    @property
    def tracker(self) -> "Run | None":
        """The run; None before it begins."""
        return self._values.run

    def start(self) -> None:
        """Wait for the first value: `fp8scope.attach` may come before."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add to the run's configuration."""
        self._values.configure(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values. `step`: Accelerate's own."""
        self._values.log(values, step)

    def finish(self) -> None:
        """Finish the run if this tracker began it; called by `accelerator.end_training()`."""
        self._values.finish()


tracking.LOGGER_TYPE_TO_CLASS.setdefault("fp8scope", NamedTracker)
