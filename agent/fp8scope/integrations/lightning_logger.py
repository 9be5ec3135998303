"""The methods of a logger for Lightning and for Fabric, whose base classes differ."""

import math
import secrets
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from lightning_utilities.core.rank_zero import rank_zero_only

from fp8scope.integrations.run_values import RunValues
from fp8scope.scalars import is_tensor

if TYPE_CHECKING:
    from fp8scope.run import Run

_COMPARED = (int, float)


class Recording(Protocol):
    """Records values of a module at every step: `fp8scope.integrations.lightning.Fp8scopeCallback`."""

    last: Mapping[str, Any]
    """The values that it has recorded last, by name."""


class LazyRun:
    """Stands for the run as a logger's `experiment`: it begins when it is first used.

    Lightning asks for the experiment of each logger before the callback knows what the run is.
    """

    def __init__(self, values: RunValues) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._values.begin(), name)


class LoggerMethods:
    """Records what Lightning or Fabric gives to its loggers, on the main process.

    `run` is a run that has already begun. Without it, values go to the run that this process records, else to
    one that begins with `arguments` as for `fp8scope.init`. Values keep their names; `tracker_step/lightning`
    is Lightning's own step. `save_dir` is for what Lightning itself stores.

    Beside `Fp8scopeCallback` in one Trainer, both record to the callback's run, and each value once: those of
    every step by the callback, those of epochs and validations, and what only loggers get, by the logger.
    """

    def __init__(self, run: "Run | None" = None, *, save_dir: str = ".", **arguments: Any) -> None:
        super().__init__()
        self._save_dir = save_dir
        self.values = RunValues("lightning", run, **arguments)
        self.own_names: set[str] = set()
        """Names of the values that the callback leaves to the logger."""
        self.beside: Recording | None = None
        """The callback of the same Trainer."""
        self._checkpoint = ""
        self._version = secrets.token_hex(4)

    @property
    def name(self) -> str:
        """The name of the folder in which Lightning stores checkpoints."""
        return "fp8scope"

    @property
    def version(self) -> str:
        """A random text, which names the folder in `name`: the run may begin later."""
        return self._version

    @property
    def save_dir(self) -> str:
        """The folder in which Lightning stores checkpoints and the configuration of its command line."""
        return self._save_dir

    @property
    def experiment(self) -> Any:
        """The run (`fp8scope.run.Run`), which begins when it is first used; None on other ranks."""
        return LazyRun(self.values) if getattr(rank_zero_only, "rank", 0) in (None, 0) else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record values, beside the framework's own step."""
        own = {name: value for name, value in metrics.items() if not self._is_recorded(name, value)}
        self.own_names |= own.keys()
        if own:
            self.values.log(own, step)

    @rank_zero_only
    def log_hyperparams(
        self, params: "Mapping[str, Any] | Namespace", metrics: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Add to the run's configuration; the numbers in `metrics` become values of step 0."""
        self.values.configure(vars(params) if isinstance(params, Namespace) else dict(params))
        if metrics:
            self.values.log(metrics, 0)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Remember the last checkpoint, or the best one: others may be removed."""
        self._checkpoint = str(checkpoint_callback.last_model_path or checkpoint_callback.best_model_path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Link the checkpoint, and note a failure. The run goes on: `trainer.test` may follow."""
        if self._checkpoint and self.values.run is not None:
            self.values.run.log_artefact("Checkpoint", self._checkpoint)
        error = sys.exc_info()[1]
        if status == "failed" and error is not None:
            self.values.failed(error)

    def _is_recorded(self, name: str, value: Any) -> bool:
        """Return whether the callback has recorded this very value."""
        if self.beside is None or name in self.own_names or name not in self.beside.last:
            return False
        other = self.beside.last[name]
        # Lightning has read both from the device already, so that this does not wait for it.
        mine, its = (float(x) if is_tensor(x) or isinstance(x, _COMPARED) else None for x in (value, other))
        return (
            mine is not None and its is not None and (mine == its or (math.isnan(mine) and math.isnan(its)))
        )


def logger_of(trainer: Any) -> LoggerMethods | None:
    """Return fp8scope's logger of a Trainer, if it has one."""
    return next((logger for logger in trainer.loggers if isinstance(logger, LoggerMethods)), None)
