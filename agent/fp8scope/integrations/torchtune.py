"""torchtune: the option `metric_logger._component_=fp8scope.integrations.torchtune.Fp8scopeLogger`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from torchtune.training.metric_logging import MetricLoggerInterface
from torchtune.utils import get_world_size_and_rank

from fp8scope.integrations.run_values import RunValues

if TYPE_CHECKING:
    from fp8scope.run import Run


class Fp8scopeLogger(MetricLoggerInterface):
    """Records what a recipe logs, on its first rank.

    `run` is a run that has already begun. Without it, values go to the run that this process records, else to
    one that begins with `arguments` as for `fp8scope.init`, and ends with `close`. `log_dir`, which the
    configurations of other loggers have, is ignored.
    """

    def __init__(self, run: "Run | None" = None, log_dir: str | None = None, **arguments: Any) -> None:
        self.values = RunValues("torchtune", run, **arguments)
        self._is_first = get_world_size_and_rank()[1] == 0

    def log(self, name: str, data: Any, step: int) -> None:
        """Record a value beside the recipe's step."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Record values beside the recipe's step."""
        if self._is_first:
            self.values.log(payload, step)

    def log_config(self, config: DictConfig) -> None:
        """Add the recipe's configuration to that of the run."""
        if self._is_first:
            entries: Any = OmegaConf.to_container(config, resolve=True)
            self.values.configure(entries)

    def close(self) -> None:
        """End the run, if the logger has begun it."""
        self.values.finish()
