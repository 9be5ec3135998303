"""Composer (`mosaicml`): `Trainer(..., loggers=[Fp8scopeLogger(project="...")])`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer.loggers import LoggerDestination
from composer.utils import dist

from fp8scope.integrations.run_values import RunValues

if TYPE_CHECKING:
    from fp8scope.run import Run


class Fp8scopeLogger(LoggerDestination):
    """Records what Composer logs, on its first rank.

    `run` is a run that has already begun. Without it, values go to the run that this process records, else to
    one that begins with `arguments` as for `fp8scope.init`, and ends when the Trainer is closed.
    """

    def __init__(self, run: "Run | None" = None, **arguments: Any) -> None:
        self.values = RunValues("composer", run, **arguments)
        self._is_first = dist.get_global_rank() == 0

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Add to the run's configuration."""
        if self._is_first:
            self.values.configure(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record values beside Composer's batch."""
        if self._is_first:
            self.values.log(metrics, step)

    def close(self, state: Any, logger: Any) -> None:
        """End the run, if the logger has begun it."""
        self.values.finish()
