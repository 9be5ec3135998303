"""Accelerate: `Accelerator.log` hands values to trackers, of which some are captured themselves."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8scope.capture.patching import TrackerPatches

NAME = "accelerate"


def install(patches: TrackerPatches) -> None:
    """Capture `Accelerator.log` and `init_trackers`, of the main process."""
    capture = patches.capture

    def logging(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log(accelerator: Any, values: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not accelerator.is_main_process:
                return original(accelerator, values, step, *args, **kwargs)
            with capture.around(NAME, values, step):
                return original(accelerator, values, step, *args, **kwargs)

        return log

    def init_trackers(
        accelerator: Any, project_name: Any = None, config: Any = None, *_: Any, **__: Any
    ) -> None:
        if accelerator.is_main_process:
            capture.configure(NAME, config)

    def replace(module: ModuleType) -> None:
        patches.replace(module.Accelerator, "log", logging, tracker=NAME)
        patches.before(module.Accelerator, "init_trackers", init_trackers, tracker=NAME)

    patches.when_imported("accelerate.accelerator", replace)
