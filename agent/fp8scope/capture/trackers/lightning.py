"""Lightning: any logger of a `Trainer` or of `Fabric`, also one that the script defines."""

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from fp8scope.capture.patching import TrackerPatches

NAME = "lightning"
OWNERS = {
    "lightning.pytorch.trainer.trainer": ("Trainer", "loggers"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "loggers"),
    "lightning.fabric.fabric": ("Fabric", "_loggers"),
    "lightning_fabric.fabric": ("Fabric", "_loggers"),
}
"""Classes that get loggers, and their attribute of these."""


def install(patches: TrackerPatches) -> None:
    """Capture `log_metrics` of the loggers' classes, once a Trainer or Fabric has them."""
    capture = patches.capture

    def metrics(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log_metrics(logger: Any, metrics: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not _is_rank_zero():
                return original(logger, metrics, step, *args, **kwargs)
            with capture.around(NAME, metrics, step):
                return original(logger, metrics, step, *args, **kwargs)

        return log_metrics

    def follow(classes: Iterable[type]) -> None:
        for logger in classes:
            owner = next((base for base in logger.__mro__ if "log_metrics" in vars(base)), None)
            if owner is not None:
                patches.replace(owner, "log_metrics", metrics, tracker=NAME)

    def replace(module: ModuleType) -> None:
        class_name, attribute = OWNERS[module.__name__]
        # Loggers that the script has made already.
        follow(_logger_classes())

        def making(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __init__(owner: Any, *args: Any, **kwargs: Any) -> None:
                original(owner, *args, **kwargs)
                try:
                    follow([type(logger) for logger in getattr(owner, attribute)])
                except Exception as error:
                    capture.caught("capturing the loggers of Lightning", error)

            return __init__

        patches.replace(getattr(module, class_name), "__init__", making, tracker=NAME)

    for module in OWNERS:
        patches.when_imported(module, replace)


def _is_rank_zero() -> bool:
    """Return whether Lightning's loggers write in this process."""
    module: Any = sys.modules.get("lightning_utilities.core.rank_zero")
    return module is None or getattr(module.rank_zero_only, "rank", 0) in (None, 0)


def _logger_classes() -> list[type]:
    """The imported classes of loggers that define `log_metrics` themselves."""
    left: list[type] = [
        module.Logger
        for name in ("lightning.fabric.loggers.logger", "lightning_fabric.loggers.logger")
        if (module := sys.modules.get(name)) is not None
    ]
    classes: dict[type, None] = {}
    while left:
        derived: list[type] = left.pop().__subclasses__()
        classes |= dict.fromkeys(derived)
        left += derived
    return [logger for logger in classes if "log_metrics" in vars(logger)]
