"""The CPU kernels' libraries, one for each level of processor: their names, flags and sources.

Used to build the libraries and to load them. The build runs this file without importing the package, so this
file must not import torch or any other package.
"""

import hashlib
import platform
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "csrc"


class Level(NamedTuple):
    """A level of processor: a name, and the compiler flags of its library."""

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
    """This machine's architecture, by its name in LEVELS if it is there."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def levels(architecture: str | None = None) -> tuple[Level, ...]:
    """The levels of an architecture, lowest first; empty if there are no kernels for it."""
    if sys.platform not in ("linux", "darwin"):
        return ()
    return LEVELS.get(architecture or machine(), ())


def path(level: Level) -> Path:
    """The path of the library: beside this file, both in a source tree and in an installed package."""
    return FOLDER / f"{level.module}.so"


def sources(folder: Path = SOURCES) -> list[Path]:
    """The C++ files; empty in an installed wheel."""
    return sorted(folder.glob("*.[ch]*"))


def digest(folder: Path = SOURCES) -> str:
    """A hash of the C++ files and the levels, which the build puts into each library; empty without files."""
    files = sources(folder)
    if not files:
        return ""
    content = hashlib.sha256(repr(LEVELS).encode())
    for file in files:
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()
