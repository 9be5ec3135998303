"""Ray Train: `RunConfig(callbacks=[Fp8scopeCallback(project="...")])`, for what workers report.

In a worker's loop, `fp8scope.attach(model, optimizer)` records tensors and every loss of each rank instead.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

# Not `ray.train.UserCallback`: it is not told when the training ends, and Ray then ends the process at once.
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback

from fp8scope.integrations.run_values import RunValues

if TYPE_CHECKING:
    from fp8scope.run import Run


class Fp8scopeCallback(ReportCallback, WorkerGroupCallback, ControllerCallback):
    """Records what the first worker gives to `ray.train.report`, in the controller's process.

    `arguments` are those of `fp8scope.init`. `step` names the reported value that counts the steps; without
    it, or where it is not reported, a step is a report. With `all_workers`, values of the others are recorded
    as `worker<rank>/<name>`.
    """

    def __init__(self, *, step: str = "step", all_workers: bool = False, **arguments: Any) -> None:
        # The controller runs in another folder: the spool belongs where the script runs.
        arguments.setdefault("directory", os.path.abspath(os.environ.get("FP8SCOPE_DIR") or ".fp8scope"))
        self.values = RunValues("ray", **arguments)
        self._step = step
        self._all_workers = all_workers
        self._reports = 0

    def after_report(self, training_report: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Record what the workers have reported."""
        self._reports += 1
        first = metrics[0] if metrics else {}
        values: dict[str, Any] = dict(first)
        if self._all_workers:
            for rank, reported in enumerate(metrics[1:], 1):
                values[f"worker{rank}"] = dict(reported)
        self.values.log(values, first.get(self._step, self._reports))
        run: Run | None = self.values.run
        checkpoint = training_report.checkpoint
        if checkpoint is not None and run is not None:
            run.log_artefact("Checkpoint", str(checkpoint.path))

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Remember that a worker has failed; a later step forgets it."""
        for error in list(worker_group_status.errors.values())[:1]:
            self.values.failed(error)

    async def before_controller_shutdown(self) -> None:
        """End the run."""
        self.values.finish()
