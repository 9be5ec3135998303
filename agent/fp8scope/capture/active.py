"""The capture of this process, and the functions of trackers that are replaced for it."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fp8scope.capture.capture import ValueCapture
from fp8scope.capture.patching import TrackerPatches
from fp8scope.capture.trackers import INSTALLERS

if TYPE_CHECKING:
    from fp8scope.run import Run

logger = logging.getLogger("fp8scope")

_active: "tuple[ValueCapture, TrackerPatches] | None" = None
_of_runs: "weakref.WeakKeyDictionary[Run, ValueCapture]" = weakref.WeakKeyDictionary()
"""The captures that loggers have asked for, by their run."""


def current() -> ValueCapture | None:
    """Return the capture of this process; None without."""
    return None if _active is None else _active[0]


def capture_of(run: "Run") -> ValueCapture:
    """Return the capture that is bound to this run: one for all its loggers, since they share its steps."""
    capture = current()
    if capture is None or capture.run is not run:
        capture = _of_runs.get(run)
    if capture is None:
        capture = _of_runs[run] = ValueCapture()
    capture.bind(run)
    return capture


def start(
    trackers: Sequence[str],
    begin: "Callable[[bool], Run | None] | None" = None,
    capture: ValueCapture | None = None,
) -> ValueCapture | None:
    """Begin to capture the calls of these trackers, imported or not. Returns None if there is nothing to do.

    `begin`: see `ValueCapture`. `capture`: the one to use, by default another. A capture of this process that
    goes on is kept.
    """
    global _active
    if _active is not None or not trackers:
        return current()
    capture = ValueCapture(begin) if capture is None else capture
    patches = TrackerPatches(capture)
    _active = capture, patches
    for tracker in trackers:
        patches.install(tracker, INSTALLERS[tracker])
    return capture


def stop(capture: ValueCapture) -> None:
    """Capture no more, and restore the functions of the trackers."""
    global _active
    capture.close()
    if _active is not None and _active[0] is capture:
        _active[1].restore()
        _active = None


def capture_into(run: "Run", trackers: Sequence[str]) -> None:
    """Capture the calls of these trackers for one run, until it ends."""
    if run.finished or run.session.settings.mode == "disabled":
        return
    capture = start(trackers, capture=_of_runs.get(run))
    if capture is None or not trackers:
        return
    capture.bind(run)
    if not capture.begins_runs:
        run.session.before_end.append(lambda: _stop_after(capture, run))


def _stop_after(capture: ValueCapture, run: "Run") -> None:
    # Another run may have begun since, which captures the calls now.
    if capture.run in (None, run):
        stop(capture)
