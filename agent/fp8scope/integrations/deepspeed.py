"""DeepSpeed: `record(engine)` after `deepspeed.initialize`, beside the monitors of its configuration."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepspeed import comm
from deepspeed.monitor.monitor import Monitor

from fp8scope.integrations.run_values import RunValues

if TYPE_CHECKING:
    from fp8scope.run import Run

NAME = "deepspeed"
Event = tuple[str, Any, Any]
"""A name, a value, and the number of samples trained so far."""


class Fp8scopeMonitor(Monitor):
    """Records the events of an engine, on its first rank, and hands them on to the engine's own monitors.

    DeepSpeed's monitors count samples, which are recorded beside the values as `deepspeed/samples`. The step
    beside them is that of the optimizer, `engine.global_steps`.
    """

    def __init__(self, engine: Any, run: "Run | None" = None, **arguments: Any) -> None:
        self._engine = engine
        self._theirs = engine.monitor
        self.monitor_config = self._theirs.monitor_config
        self.enabled = True
        self.values = RunValues(NAME, run, **arguments)
        self._is_first = comm.get_rank() == 0

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Record events, and hand them on."""
        if self._is_first:
            steps = self._engine.global_steps
            for name, value, samples in event_list:
                self.values.log({name: value, f"{NAME}/samples": samples}, steps)
        if self._theirs.enabled:
            self._theirs.write_events(event_list)

    def __getattr__(self, name: str) -> Any:
        # `tb_monitor` and others, which scripts read.
        return getattr(self.__dict__["_theirs"], name)


def record(engine: Any, run: "Run | None" = None, **arguments: Any) -> Fp8scopeMonitor:
    """Record what the engine gives to its monitors, and return the new monitor.

    `run` is a run that has already begun. Without it, values go to the run that this process records, else to
    one that begins with `arguments` as for `fp8scope.init`.
    """
    engine.monitor = monitor = Fp8scopeMonitor(engine, run, **arguments)
    monitor.values.configure({NAME: engine.config})
    return monitor
