"""SwanLab: `swanlab.log` calls `Run.log`."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8scope.capture.patching import TrackerPatches
from fp8scope.capture.trackers.wandb import StepCounter

NAME = "swanlab"
MODULES = ("swanlab.sdk.internal.run", "swanlab.data.run.main")
"""The modules in which versions from 0.8 on, and older ones, define the run."""


def install(patches: TrackerPatches) -> None:
    """Capture `Run.log`, and the configuration given to `init`."""
    capture = patches.capture
    counter = StepCounter()

    def log(run: Any, data: Any, step: Any = None, *_: Any, **__: Any) -> None:
        capture.take(NAME, data, counter.next(run, step, commits=True))

    def replace(module: ModuleType) -> None:
        owner = getattr(module, "Run", None) or getattr(module, "SwanLabRun", None)
        patches.before(owner, "log", log, tracker=NAME)

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            run = original(*args, **kwargs)
            capture.configure(NAME, kwargs.get("config"))
            return run

        return init

    for module in MODULES:
        patches.when_imported(module, replace)
    patches.when_imported("swanlab", lambda module: patches.replace(module, "init", beginning, tracker=NAME))
