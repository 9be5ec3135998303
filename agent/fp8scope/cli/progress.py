"""Progress of the agent's commands as plain lines on stderr."""

import sys
import time
from typing import TextIO

LINE_SECONDS = 10.0
"""Seconds between two lines where stderr is no terminal."""
REDRAW_SECONDS = 0.2
"""Seconds between two updates of the line on a terminal."""
MIB = 1 << 20


class ProgressLine:
    """Shows how much of a task is done: one line that is redrawn on a terminal, else a line now and then.

    A task that ends within the first interval prints nothing.
    """

    def __init__(self, label: str, *, unit: str = "", scale: int = 1, stream: TextIO | None = None) -> None:
        self._label = label
        self._unit = f" {unit}" if unit else ""
        self._scale = scale
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._shown_at = time.monotonic()
        self._width = 0

    def update(self, done: int, total: int) -> None:
        """`done` of `total` is done; shown if the last line is old enough."""
        now = time.monotonic()
        if now - self._shown_at < (REDRAW_SECONDS if self._is_terminal else LINE_SECONDS):
            return
        self._shown_at = now
        share = f"{min(100, 100 * done // total)} %" if total > 0 else "0 %"
        amount = f"{done // self._scale:,} of {total // self._scale:,}{self._unit}"
        text = f"{self._label}: {share} ({amount})"
        if self._is_terminal:
            self._stream.write(f"\r{text:<{self._width}}")
            self._width = len(text)
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear the line on a terminal."""
        if self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")
            self._stream.flush()
            self._width = 0
