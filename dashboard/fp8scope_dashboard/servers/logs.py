"""What the children say: each line to a bounded file of its own, and to whoever listens."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import Thread

MAX_BYTES = 5_000_000
BACKUPS = 3
# A line longer than this is cut into several: nothing a child prints may fill our memory.
MAX_LINE_BYTES = 16_384

Echo = Callable[[str, str], None]
"""Called as `echo(child, line)` for each line; what it raises is its own trouble."""


class LogFile:
    """`<directory>/<name>.log`, at most (BACKUPS + 1) * MAX_BYTES, and a copy of each line to `echo`."""

    def __init__(self, directory: Path, name: str, echo: Echo | None = None) -> None:
        self.name = name
        self.echo = echo
        self._handler = RotatingFileHandler(
            directory / f"{name}.log",
            maxBytes=MAX_BYTES,
            backupCount=BACKUPS,
            encoding="utf-8",
            errors="replace",
        )
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, line: str) -> None:
        """Keep one line, without its end."""
        self._handler.handle(logging.makeLogRecord({"msg": line, "levelno": logging.INFO}))
        if self.echo is not None:
            self.echo(self.name, line)

    def pipe(self) -> int:
        """A new file descriptor for a child to write to; the caller closes its copy after the child's start.

        The reading end closes by itself when every copy of the returned one is closed.
        """
        reading, writing = os.pipe()
        Thread(target=self._pump, args=(reading,), name=f"log-{self.name}", daemon=True).start()
        return writing

    def close(self) -> None:
        """Close the file; later lines open it again."""
        self._handler.close()

    def _pump(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as stream:
            while raw := stream.readline(MAX_LINE_BYTES):
                self.write(raw.decode("utf-8", errors="replace").rstrip("\r\n"))
