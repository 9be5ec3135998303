"""Finds the C++ compiler for the CPU kernels: the machine's, else Zig's from PyPI."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ZIG = "ziglang==0.17.1"
"""Pinned, because published wheels are built with it."""
GLIBC = "2.17"
"""The oldest glibc that libraries built with Zig support: manylinux_2_17, of 2012."""
COMPILE_SECONDS = 600

PROBE = """
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
extern "C" __attribute__((visibility("default"))) int probe(uint32_t* x, int n) {
  const auto go = [&](auto* in) { std::nth_element(in, in + n / 2, in + n); return std::countl_zero(in[0]); };
  return go(x);
}
"""


@dataclass(frozen=True)
class Compiler:
    """The commands, without file names, that compile C++ and link a shared library."""

    name: str
    compile: tuple[str, ...]
    link: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, command: tuple[str, ...]) -> None:
        """Run a command. Raises RuntimeError with the compiler's output if it fails."""
        try:
            done = subprocess.run(
                command,
                env=os.environ | self.environment,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
                check=False,
            )
        except OSError as error:
            raise RuntimeError(f"{self.name} cannot be started: {error}") from error
        if done.returncode:
            raise RuntimeError(f"{self.name} failed: {shlex.join(command)}\n{done.stderr.strip()[-4000:]}")

    def build(self, source: Path, target: Path, flags: tuple[str, ...]) -> None:
        """Compile `source` and link it as the shared library `target`."""
        compiled = target.with_suffix(".o")
        self.run((*self.compile, *flags, "-c", str(source), "-o", str(compiled)))
        self.run((*self.link, str(compiled), "-o", str(target)))


def find(architecture: str, probe_flags: tuple[str, ...], work: Path) -> Compiler | None:
    """Return the first of $CXX, g++, clang++, c++ and Zig that can build for `architecture`, or None.

    CXX=zig tries only Zig. `work` is a folder for Zig's caches.
    """
    asked = os.environ.get("CXX", "")
    machine = () if asked == "zig" else _machine_compilers(asked)
    for compiler in machine:
        with tempfile.TemporaryDirectory(prefix="fp8scope-") as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(PROBE)
            try:
                compiler.build(source, Path(folder, "probe.so"), probe_flags)
            except (RuntimeError, subprocess.TimeoutExpired):
                continue
        return compiler
    return _zig(architecture, work) if find_spec("ziglang") else None


def _machine_compilers(asked: str) -> Iterator[Compiler]:
    link = ["-shared", "-s", "-static-libgcc", "-Wl,--as-needed", "-Wl,-z,defs"]
    if sys.platform == "darwin":
        link = ["-shared"]
    for name in (asked, "g++", "clang++", "c++"):
        command = shlex.split(name)
        if command and (path := shutil.which(command[0])):
            start = (path, *command[1:])
            yield Compiler(shlex.join(start), start, (*start, *link))


def _zig(architecture: str, work: Path) -> Compiler:
    system = f"macos-{'none'}" if sys.platform == "darwin" else f"linux-gnu.{GLIBC}"
    zig, target = (sys.executable, "-m", "ziglang"), ("-target", f"{architecture}-{system}")
    # A private cache for this build: other users cannot have written to it.
    caches = {f"ZIG_{kind}_CACHE_DIR": str(work / "zig") for kind in ("GLOBAL", "LOCAL")}
    return Compiler(
        f"Zig ({ZIG})",
        (*zig, "c++", *target),
        # Link as C: the kernels need no C++ runtime, which Zig would have to compile first.
        (*zig, "cc", *target, "-shared", "-s", "-Wl,-z,defs"),
        caches,
    )
