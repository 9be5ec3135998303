"""torchtitan: `metrics=Fp8scopeMetrics.Config(...)` in a configuration of a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components import metrics
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor

from fp8scope.integrations.run_values import RunValues

if TYPE_CHECKING:
    from fp8scope.run import Run


class Fp8scopeLogger(BaseLogger):
    """Records the metrics of torchtitan.

    `run` is a run that has already begun. Without it, values go to the run that this process records, else to
    one that begins with `arguments` as for `fp8scope.init`, and ends with `close`. `tag` precedes names, as
    in torchtitan's own loggers. `job` is the configuration of the job.
    """

    def __init__(
        self,
        run: "Run | None" = None,
        *,
        tag: str | None = None,
        job: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.values = RunValues("torchtitan", run, **arguments)
        self._tag = tag
        self.values.configure(job or {})

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record metrics beside torchtitan's step."""
        self.values.log({f"{self._tag}/{k}" if self._tag else k: v for k, v in metrics.items()}, step)

    def close(self) -> None:
        """End the run, if the logger has begun it."""
        self.values.finish()


class Fp8scopeMetrics(MetricsProcessor):
    """torchtitan's metrics processor, which gives its metrics to fp8scope as well."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """Adds options to those of torchtitan."""

        enable_fp8scope: bool = True
        """Records the metrics if set"""

        fp8scope_name: str = ""
        """The name of the run; by default the script and the time"""

        fp8scope_group: str = ""
        """The group of runs that differ only in their seed"""

        fp8scope_baseline: str = ""
        """The group, or the id of the run, to compare with"""

    def _build_metric_logger(
        self,
        *,
        config: Any,
        parallel_dims: Any,
        pp_schedule: str,
        config_dict: dict[str, Any] | None = None,
        tag: str | None = None,
        **more: Any,
    ) -> BaseLogger:
        """Return torchtitan's loggers and that of fp8scope, on the ranks that torchtitan logs on."""
        theirs = super()._build_metric_logger(
            config=config,
            parallel_dims=parallel_dims,
            pp_schedule=pp_schedule,
            config_dict=config_dict,
            tag=tag,
            **more,
        )
        rank = metrics._get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
        if not config.enable_fp8scope or not (
            config.save_for_all_ranks or torch.distributed.get_rank() == rank
        ):
            return theirs
        # Without any of its own loggers torchtitan returns a BaseLogger, which takes no others.
        loggers = theirs if isinstance(theirs, LoggerContainer) else LoggerContainer()
        chosen = {
            "name": config.fp8scope_name,
            "group": config.fp8scope_group,
            "baseline": config.fp8scope_baseline,
        }
        arguments = {name: value for name, value in chosen.items() if value}
        loggers.add_logger(Fp8scopeLogger(tag=tag, job=config_dict, **arguments))
        return loggers
