"""Hears what the program writes to its standard streams, without changing where it goes.

`write` of the stream objects is wrapped, so that logging handlers, progress bars and everything else that
kept a stream is heard, too. Writes that do not pass through these objects are not: those of subprocesses, of
native code, and to `sys.stdout.buffer`. A pipe below the streams would hear them, but then a full pipe could
stop the training.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Literal

StreamName = Literal["stdout", "stderr"]
Listener = Callable[[str], None]
"""Gets each text that was written. It must be quick, and must not raise."""

STREAMS: Final[tuple[StreamName, ...]] = ("stdout", "stderr")


class _Local(threading.local):
    """True while this thread is inside a wrapped `write`.

    One that writes on to another stream counts once.
    """

    inside = False


_local = _Local()


class Tap:
    """Wraps `write` of one stream until the last listener has left."""

    def __init__(self, stream: Any) -> None:
        """Raises AttributeError or TypeError if the stream does not allow it."""
        self.stream = stream
        self.listeners: list[Listener] = []
        self._write = _wrapped(stream.write, self.listeners)
        stream.write = self._write

    def remove(self) -> bool:
        """Restore the stream; False if another library has wrapped it since."""
        if vars(self.stream).get("write") is not self._write:
            return False
        del self.stream.write
        return True


def _wrapped(write: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    local = _local

    def heard(*arguments: Any, **named: Any) -> Any:
        # A program's own stream may take other things than text.
        if local.inside or not (arguments and isinstance(arguments[0], str)):
            return write(*arguments, **named)
        local.inside = True
        try:
            # What it takes, returns or raises is the program's.
            result = write(*arguments, **named)
        finally:
            local.inside = False
        for listen in listeners:
            listen(arguments[0])
        return result

    return heard


_taps: list[Tap] = []
_lock = threading.Lock()


def listen(listeners: dict[StreamName, Listener]) -> bool:
    """Call the listeners for what is written from now on. Returns whether both streams can be heard."""
    identities: list[int] = []
    complete = True
    with _lock:
        for name in STREAMS:
            for stream in (getattr(sys, name, None), getattr(sys, f"__{name}__", None)):
                if stream is None or id(stream) in identities:
                    continue
                identities.append(id(stream))
                try:
                    _tap_of(stream).listeners.append(listeners[name])
                except (AttributeError, TypeError):
                    complete = complete and stream is not getattr(sys, name)
    return complete


def leave(listeners: dict[StreamName, Listener]) -> None:
    """Call the listeners no more, and restore the streams that nobody hears."""
    with _lock:
        for tap in list(_taps):
            for listener in listeners.values():
                while listener in tap.listeners:
                    tap.listeners.remove(listener)
            if not tap.listeners and tap.remove():
                _taps.remove(tap)


def leave_in_child() -> None:
    """In a forked child: hear nothing. The lock is new, since its holder may not exist in the child."""
    global _lock
    _lock = threading.Lock()
    for tap in _taps:
        tap.listeners.clear()
        with contextlib.suppress(AttributeError):
            tap.remove()
    _taps.clear()


def _tap_of(stream: Any) -> Tap:
    tap = next((tap for tap in _taps if tap.stream is stream), None)
    if tap is None:
        tap = Tap(stream)
        _taps.append(tap)
    return tap
