"""Replaces the functions of trackers as soon as the program has imported them, and restores them."""

import functools
import importlib.metadata
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8scope.capture.capture import ValueCapture
from fp8scope.process.import_hook import when_imported
from fp8scope.process.patches import Patch

logger = logging.getLogger("fp8scope")

Before = Callable[..., None]
"""Called with the arguments of a replaced function, before it."""
Install = Callable[["TrackerPatches"], None]


class TrackerPatches:
    """The replaced functions of the trackers. A function that cannot be replaced is one warning a tracker."""

    def __init__(self, capture: ValueCapture) -> None:
        self.capture = capture
        self._tracker = ""
        self._patches: list[Patch] = []
        self._cancels: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._warned: set[str] = set()

    def install(self, tracker: str, install: Install) -> None:
        """Prepare to replace the functions of a tracker."""
        self._tracker = tracker
        install(self)

    def when_imported(self, module: str, replace: Callable[[ModuleType], None]) -> None:
        """Call `replace(module)` once the program has imported the module; now if it has."""
        tracker = self._tracker

        def imported() -> None:
            try:
                replace(sys.modules[module])
            except Exception as error:
                self.capture.caught(f"capturing calls of {tracker} {version_of(tracker)}", error)

        self._cancels.append(when_imported(module, imported))

    def before(self, owner: Any, name: str, note: Before, *, tracker: str) -> None:
        """Call `note` with the arguments of `owner.name` before each call of it.

        What `note` raises is counted; what the function returns and raises is the script's.
        """

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            capture = self.capture

            @functools.wraps(original)
            def noting(*args: Any, **kwargs: Any) -> Any:
                try:
                    note(*args, **kwargs)
                except Exception as error:
                    capture.caught(f"capturing {tracker}.{name}", error)
                return original(*args, **kwargs)

            return noting

        self.replace(owner, name, wrap, tracker=tracker)

    def replace(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, tracker: str
    ) -> None:
        """Replace the function `owner.name` by what `wrap` returns for it."""
        if not callable(getattr(owner, name, None)):
            self.warn(tracker, getattr(owner, "__name__", str(owner)), f"it has no function {name}")
            return
        if not any(patch.is_on(owner, name) for patch in self._patches):
            self._patches.append(Patch(owner, name, wrap))

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the functions are restored."""
        self._undo.append(undo)

    def warn(self, tracker: str, where: str, why: str) -> None:
        """Say, once for each tracker, that its calls are not all captured."""
        if tracker not in self._warned:
            self._warned.add(tracker)
            logger.warning(
                "calls of %s %s are not all captured: %s is not as expected (%s).",
                tracker,
                version_of(tracker),
                where,
                why,
            )

    def restore(self) -> None:
        """Put the functions back."""
        for cancel in self._cancels:
            cancel()
        for patch in reversed(self._patches):
            patch.restore()
        for undo in self._undo:
            try:
                undo()
            except Exception as error:
                self.capture.caught("restoring a tracker", error)
        self._patches.clear()
        self._cancels.clear()
        self._undo.clear()


def version_of(tracker: str) -> str:
    """Return the installed version of a tracker; empty if it is not known."""
    try:
        return importlib.metadata.version(tracker)
    except importlib.metadata.PackageNotFoundError:
        return ""
