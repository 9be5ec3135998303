"""`sys.exit`, noted when it is called.

Nobody is told of the SystemExit that ends a program: `sys.excepthook` is not called for it, and when the exit
handlers run Python has dropped it, its status with it. So what raises it is wrapped: `sys.exit`, and the
`exit` and `quit` of the `site` module. They raise what they would have raised.

A call alone says little, for what it raises may be caught. Whether it ended the program shows in the call's
outermost frame: that one has stopped elsewhere than at a return.

`raise SystemExit(1)` calls nothing and is not seen here, nor is `sys.exit` by a name given to it before.
"""

import builtins
import dis
import functools
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

Note = Callable[[SystemExit, FrameType], None]
"""Takes what is about to be raised, and the frame that has called for it. Must raise nothing."""


def exit_status(code: object) -> int:
    """The status of a process that SystemExit(code) ends, as POSIX keeps it: eight bits."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def install(note: Note) -> None:
    """Have `note` called whenever one of the functions that end a program is."""
    sys.exit = noting(sys.exit, note)
    kind: Any = type(getattr(builtins, "exit", None))
    # There is none under `python -S`, and IPython's own only asks its shell to end.
    if kind.__module__ == "_sitebuiltins":
        kind.__call__ = noting(kind.__call__, note)


def noting(leave: Callable[..., Any], note: Note) -> Callable[..., Any]:
    """`leave`, which raises SystemExit, with `note` called before that gets any further."""

    @functools.wraps(leave)
    def exit(*arguments: Any, **named: Any) -> Any:
        try:
            return leave(*arguments, **named)
        except SystemExit as error:
            note(error, sys._getframe(1))
            raise

    return exit


def outermost(frame: FrameType) -> FrameType:
    """The frame that everything in this thread was called from."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def was_left_by_exception(frame: FrameType) -> bool:
    """Whether a frame that has ended was left by an exception: its last instruction was no return."""
    last = frame.f_lasti
    return last >= 0 and not dis.opname[frame.f_code.co_code[last]].startswith("RETURN_")


def told_from(error: SystemExit, frame: FrameType) -> str:
    """The traceback that `error`, about to be raised in `frame`, will have when it has left every frame."""
    trace = None
    for one, line in traceback.walk_stack(frame):
        trace = TracebackType(trace, one, one.f_lasti, line or 0)
    lines = traceback.TracebackException(type(error), error, trace)
    return "".join(lines.format())
