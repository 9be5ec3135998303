"""Notices calls of `sys.exit`, `exit` and `quit`.

Python reports a SystemExit to nobody: `sys.excepthook` is not called for it, and its status is gone when the
exit handlers run. So the functions that raise it are wrapped while a run is open; they behave as before.

A call alone does not mean that the program ends, since SystemExit can be caught. It ended the program if the
outermost frame of the call was left by an exception, see `was_left_by_exception`. `raise SystemExit(1)` is
not noticed, and neither is a reference to `sys.exit` that was taken before the run began.
"""

import builtins
import dis
import functools
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from fp8scope.process.patches import Patch

Note = Callable[[SystemExit, FrameType], None]
"""Called with the exception that is about to be raised, and the calling frame. Must not raise."""

CAN_READ_FRAMES = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 14)
"""True if bytecode has the form that `was_left_by_exception` knows."""


def exit_status(code: object) -> int:
    """The exit status of a process that ends with `SystemExit(code)`: eight bits, as in POSIX."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def install(note: Note) -> list[Patch]:
    """Call `note` whenever the program calls a function that ends it; returns the patches to restore."""

    def wrap(leave: Callable[..., Any]) -> Callable[..., Any]:
        return noting(leave, note)

    patches = [Patch(sys, "exit", wrap)]
    quitter: Any = type(getattr(builtins, "exit", None))
    # `python -S` has no `exit`; that of IPython only asks its shell to end.
    if quitter.__module__ == "_sitebuiltins":
        patches.append(Patch(quitter, "__call__", wrap))
    return patches


def noting(leave: Callable[..., Any], note: Note) -> Callable[..., Any]:
    """Wrap `leave`, which raises SystemExit, so that `note` is called before the exception propagates."""

    @functools.wraps(leave)
    def exit(*arguments: Any, **named: Any) -> Any:
        try:
            return leave(*arguments, **named)
        except SystemExit as error:
            note(error, sys._getframe(1))
            raise

    return exit


def outermost(frame: FrameType) -> FrameType:
    """The outermost frame of the thread that `frame` belongs to."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def was_left_by_exception(frame: FrameType) -> bool:
    """Return whether a frame that has ended was left by an exception: its last instruction is not a return.

    On a Python whose bytecode is not known the answer is True: callers must have another sign that the
    program went on after the call.
    """
    if not CAN_READ_FRAMES:
        return True
    last = frame.f_lasti
    return last >= 0 and not dis.opname[frame.f_code.co_code[last]].startswith("RETURN_")


def format_exit(error: SystemExit, frame: FrameType) -> str:
    """Format `error`, about to be raised in `frame`, with the traceback that it will have at the top."""
    trace = None
    for caller, line in traceback.walk_stack(frame):
        trace = TracebackType(trace, caller, caller.f_lasti, line or 0)
    lines = traceback.TracebackException(type(error), error, trace)
    return "".join(lines.format())
