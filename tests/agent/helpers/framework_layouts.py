"""Modules laid out like those of frameworks that the tests do not install.

Each has only what fp8scope's integration imports or replaces, with the signatures of the version named.
`benchmarks/capture.py` runs the frameworks themselves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """Make the module `name`, and packages above it, importable for the length of a test."""
    for end in range(1, name.count(".") + 1):
        package = ".".join(name.split(".")[:end])
        if package not in sys.modules:
            parent = ModuleType(package)
            parent.__path__ = []
            monkeypatch.setitem(sys.modules, package, parent)
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    above, _, last = name.rpartition(".")
    if above:
        monkeypatch.setattr(sys.modules[above], last, module, raising=False)
    return module


def torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan 0.3."""

    class BaseLogger:
        def log(self, metrics: dict[str, Any], step: int) -> None: ...

        def close(self) -> None: ...

    class LoggerContainer(BaseLogger):
        def __init__(self) -> None:
            self._loggers: list[BaseLogger] = []

        def add_logger(self, logger_instance: BaseLogger) -> None:
            self._loggers.append(logger_instance)

        def log(self, metrics: dict[str, Any], step: int) -> None:
            for logger in self._loggers:
                logger.log(metrics, step)

        def close(self) -> None:
            for logger in self._loggers:
                logger.close()

    class MetricsProcessor:
        @dataclass(kw_only=True, slots=True)
        class Config:
            log_freq: int = 10
            enable_tensorboard: bool = False
            save_for_all_ranks: bool = False

        def __init__(self, config: Any, **how: Any) -> None:
            self.logger = self._build_metric_logger(config=config, **how)

        def _build_metric_logger(
            self,
            *,
            config: Any,
            parallel_dims: Any,
            dump_folder: str,
            pp_schedule: str,
            config_dict: dict[str, Any] | None = None,
            tag: str | None = None,
        ) -> BaseLogger:
            return LoggerContainer() if config.enable_tensorboard else BaseLogger()

    def _get_metrics_rank(*, parallel_dims: Any, pp_schedule: str) -> int:
        return int(parallel_dims.metrics_rank)

    install(
        monkeypatch,
        "torchtitan.components.metrics",
        BaseLogger=BaseLogger,
        LoggerContainer=LoggerContainer,
        MetricsProcessor=MetricsProcessor,
        _get_metrics_rank=_get_metrics_rank,
    )


def torchtune(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """torchtune 0.6."""
    install(monkeypatch, "torchtune.training.metric_logging", MetricLoggerInterface=object)
    install(monkeypatch, "torchtune.utils", get_world_size_and_rank=lambda: (2, rank))


def composer(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Composer 0.32."""
    install(monkeypatch, "composer.loggers", LoggerDestination=object)
    install(monkeypatch, "composer.utils", dist=SimpleNamespace(get_global_rank=lambda: rank))


def deepspeed(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """DeepSpeed 0.19."""
    install(monkeypatch, "deepspeed.monitor.monitor", Monitor=object)
    install(monkeypatch, "deepspeed.comm", get_rank=lambda: rank)


class Monitors:
    """The monitors of a DeepSpeed engine."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.monitor_config = SimpleNamespace(enabled=enabled)
        self.csv_monitor = "theirs"
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        self.events += event_list


def verl(monkeypatch: pytest.MonkeyPatch, *, has_finish: bool) -> Any:
    """verl 0.9, or before 0.9 without `finish`. Returns the class `Tracking`."""

    class Tracking:
        supported_backend = ["console", "file"]

        def __init__(
            self,
            project_name: str,
            experiment_name: str,
            default_backend: str | list[str] = "console",
            config: Any = None,
        ) -> None:
            chosen = [default_backend] if isinstance(default_backend, str) else default_backend
            assert all(backend in self.supported_backend for backend in chosen)
            self.logger: dict[str, Any] = {}

        def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
            for name, logger in self.logger.items():
                if backend is None or name in backend:
                    logger.log(data=data, step=step)

        def __del__(self) -> None: ...

    if has_finish:
        monkeypatch.setattr(Tracking, "finish", lambda tracking, exit_code=0: None, raising=False)
    install(monkeypatch, "verl.utils.tracking", Tracking=Tracking)
    return Tracking


def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray 2.60: the callbacks of Ray Train's controller."""
    bases = {
        name: type(name, (), {}) for name in ("ControllerCallback", "ReportCallback", "WorkerGroupCallback")
    }
    install(monkeypatch, "ray.train.v2._internal.execution.callback", **bases)


def megatron(monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModuleType:
    """Megatron-LM's `megatron.training.global_vars`, with torch's writer. Returns the module."""
    variables = install(monkeypatch, "megatron.training.global_vars", _GLOBAL_TENSORBOARD_WRITER=None)

    def _set_tensorboard_writer(args: Any) -> None:
        if args.tensorboard_dir and args.rank == args.world_size - 1:
            from torch.utils.tensorboard import SummaryWriter

            vars(variables)["_GLOBAL_TENSORBOARD_WRITER"] = SummaryWriter(str(folder / args.tensorboard_dir))

    vars(variables)["_set_tensorboard_writer"] = _set_tensorboard_writer
    return variables
