"""Trackio: `trackio.log` calls `Run.log`."""

from types import ModuleType
from typing import Any

from fp8scope.capture.patching import TrackerPatches

NAME = "trackio"


def install(patches: TrackerPatches) -> None:
    """Capture `Run.log`, and the configuration of a run."""
    capture = patches.capture

    def log(run: Any, metrics: Any, step: Any = None, *_: Any, **__: Any) -> None:
        capture.take(NAME, metrics, getattr(run, "_next_step", None) if step is None else step, separator=".")

    def replace(module: ModuleType) -> None:
        patches.before(module.Run, "log", log, tracker=NAME)

        def noting(original: Any) -> Any:
            def __init__(run: Any, *args: Any, **kwargs: Any) -> None:
                original(run, *args, **kwargs)
                config = getattr(run, "config", None)
                if isinstance(config, dict):
                    own = {key: value for key, value in config.items() if not str(key).startswith("_")}
                    capture.configure(NAME, own)

            return __init__

        patches.replace(module.Run, "__init__", noting, tracker=NAME)

    patches.when_imported("trackio.run", replace)
