"""Trackio: `trackio.log` calls `Run.log`."""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fp8scope.capture.capture import ValueCapture
from fp8scope.capture.media import of_trackio, of_trackio_files
from fp8scope.capture.patching import TrackerPatches

NAME = "trackio"


def install(patches: TrackerPatches) -> None:
    """Capture `Run.log` with its images, texts, tables and files, and the configuration of a run."""
    capture = patches.capture

    def logging(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log(run: Any, metrics: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
            files: list[tuple[str, Any]] = []
            try:
                count = getattr(run, "_next_step", None) if step is None else step
                files = _take_logged(capture, metrics, count)
            except Exception as error:
                capture.caught("capturing trackio.log", error)
            result = original(run, metrics, step, *args, **kwargs)
            if files:
                capture.take_media(NAME, lambda: of_trackio_files(files))
            return result

        return log

    def replace(module: ModuleType) -> None:
        patches.replace(module.Run, "log", logging, tracker=NAME)

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


def _take_logged(capture: ValueCapture, metrics: Any, count: Any) -> list[tuple[str, Any]]:
    """Record what `Run.log` is given; returns what Trackio is to write to a file first."""
    if not isinstance(metrics, Mapping):
        return []
    values, media, files = of_trackio(metrics)
    capture.take(NAME, values, count, separator=".")
    if media:
        capture.take_media(NAME, lambda: iter(media))
    return files
