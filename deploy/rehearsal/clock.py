"""A system clock that jumps, for chosen processes; see clock.c."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from servers import program

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The offset of the system clock of the processes that run in `environment`."""

    def __init__(self, folder: Path) -> None:
        """Compile the library. Raises MissingServerError without a C compiler."""
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        words = [program("cc"), "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-lm"]
        subprocess.run(words, check=True, capture_output=True)
        self.environment = {"LD_PRELOAD": str(library), "FP8SCOPE_CLOCK": str(self._file)}

    def set(self, seconds: float) -> None:
        """Move the clock, from the next time that somebody reads it."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))
