"""Aim: `Run.track` and `run[...] = ...`."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fp8scope.capture.names import name_in_context
from fp8scope.capture.patching import TrackerPatches

NAME = "aim"


def install(patches: TrackerPatches) -> None:
    """Capture `Run.track`, and the parameters that are set as entries of a run."""
    capture = patches.capture

    def track(
        run: Any,
        value: Any,
        name: Any = None,
        step: Any = None,
        epoch: Any = None,
        *,
        context: Any = None,
        **_: Any,
    ) -> None:
        values = value if isinstance(value, Mapping) else {name: value}
        if isinstance(context, Mapping) and context:
            # Aim keeps a sequence for each context: {"subset": "val"}.
            values = {name_in_context(str(key), context): number for key, number in values.items()}
        capture.take(NAME, values, step)

    def set_item(run: Any, key: Any, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(key, str) and not key.startswith("__"):
            capture.configure(NAME, value if isinstance(value, Mapping) else {key: value})

    def replace(module: ModuleType) -> None:
        patches.before(module.Run, "track", track, tracker=NAME)
        patches.before(module.Run, "__setitem__", set_item, tracker=NAME)

    patches.when_imported("aim.sdk.run", replace)
