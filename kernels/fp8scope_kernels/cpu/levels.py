"""The CPU kernels' libraries: one for each level of processor. Used to build them and to load them.

The build reads this file without importing the package, so that it needs neither torch nor anything else.
"""

import hashlib
import platform
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "csrc"


class Level(NamedTuple):
    """What a library is compiled for: a name and the compiler's flags."""

    name: str
    flags: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The library's file name without its suffix."""
        return f"kernels_{self.name}"


LEVELS = {
    "x86_64": (
        Level("x86-64"),
        Level("x86-64-v2", ("-msse4.2", "-mpopcnt")),
        Level("x86-64-v3", ("-mavx2", "-mbmi", "-mbmi2", "-mfma")),
        Level(
            "x86-64-v4",
            ("-mavx2", "-mbmi", "-mbmi2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq")
            + ("-mavx512vl", "-mprefer-vector-width=512"),
        ),
    ),
    "aarch64": (Level("armv8-a"),),
}
"""For each architecture the lowest level first: csrc/processor_level.h returns indices into these."""


def machine() -> str:
    """This machine's architecture, by the name that LEVELS has if it has one."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def levels(architecture: str | None = None) -> tuple[Level, ...]:
    """The levels that libraries are built for, lowest first; empty where there are no kernels."""
    if sys.platform not in ("linux", "darwin"):
        return ()
    return LEVELS.get(architecture or machine(), ())


def path(level: Level) -> Path:
    """Where the library lies: beside this file, in a source tree as in an installed package."""
    return FOLDER / f"{level.module}.so"


def sources(folder: Path = SOURCES) -> list[Path]:
    """The C++ files; an installed wheel has none."""
    return sorted(folder.glob("*.[ch]*"))


def digest(folder: Path = SOURCES) -> str:
    """A hash of the C++ files and the levels, which each library has from its build; empty without files."""
    files = sources(folder)
    if not files:
        return ""
    content = hashlib.sha256(repr(LEVELS).encode())
    for file in files:
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()
