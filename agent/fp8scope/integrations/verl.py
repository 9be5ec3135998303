"""verl: `trainer.logger='["console","fp8scope"]'`, without any other change.

verl imports this module by the entry point `verl.plugins`; versions before 0.9, which have none, do so with
`VERL_USE_EXTERNAL_MODULES=fp8scope.integrations.verl`.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fp8scope.process.import_hook import when_imported

NAME = "fp8scope"
MODULE = "verl.utils.tracking"


class Fp8scopeBackend:
    """Records what a trainer of verl logs, in the run that this process records, else in another."""

    def __init__(self, project: str, experiment: str, config: Any) -> None:
        # Only a trainer that logs to fp8scope needs it: verl imports this module in every worker.
        from fp8scope.integrations.run_values import RunValues

        self.values = RunValues("verl", name=str(experiment)[:200])
        self.values.configure({"verl": {"project": project}})
        if isinstance(config, Mapping):
            self.values.configure(config)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record values beside the trainer's step."""
        self.values.log(data, step)

    def finish(self) -> None:
        """End the run, if it began here."""
        self.values.finish()


def _add_backend() -> None:
    tracking: Any = sys.modules[MODULE].Tracking
    if NAME in tracking.supported_backend:
        return
    tracking.supported_backend = [*tracking.supported_backend, NAME]
    tracking.__init__ = _making(tracking.__init__)
    # `finish` since 0.9; before, loggers end with the object.
    end = "finish" if hasattr(tracking, "finish") else "__del__"
    setattr(tracking, end, _ending(getattr(tracking, end)))


def _making(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        tracking: Any,
        project_name: str,
        experiment_name: str,
        default_backend: Any = "console",
        config: Any = None,
    ) -> None:
        original(tracking, project_name, experiment_name, default_backend, config)
        chosen = [default_backend] if isinstance(default_backend, str) else default_backend
        if NAME in chosen:
            tracking.logger[NAME] = Fp8scopeBackend(project_name, experiment_name, config)

    return __init__


def _ending(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def finish(tracking: Any, *args: Any, **kwargs: Any) -> None:
        ours = getattr(tracking, "logger", {}).get(NAME)
        if ours is not None:
            ours.finish()
        original(tracking, *args, **kwargs)

    return finish


when_imported(MODULE, _add_backend)
