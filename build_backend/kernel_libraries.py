"""Build the CPU kernels' libraries, one for each level of processor features.

`python build_backend/kernel_libraries.py` builds them into the source tree. It needs only a C++ compiler or
the package `ziglang`.
"""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import compilers

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kernels" / "fp8scope_kernels" / "cpu"
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    # No fused multiply-add: every compiler and every level must give the same bits.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def _load_levels() -> ModuleType:
    """Import cpu/levels.py by its path, because importing the package would need torch."""
    spec = spec_from_file_location("levels", PACKAGE / "levels.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


levels = _load_levels()


def architecture() -> str:
    """Return FP8SCOPE_ARCHITECTURE, else this machine's. Cross-compiling needs CXX=zig."""
    return os.environ.get("FP8SCOPE_ARCHITECTURE") or levels.machine()


def wanted() -> bool:
    """Whether to build libraries: false with FP8SCOPE_BUILD_KERNELS=0 or on unsupported platforms."""
    return os.environ.get("FP8SCOPE_BUILD_KERNELS", "1") != "0" and bool(levels.levels(architecture()))


def find_compiler(work: Path) -> compilers.Compiler | None:
    """Return a compiler that can build every level, or None."""
    highest = levels.levels(architecture())[-1]
    return compilers.find(architecture(), (*FLAGS, *highest.flags), work)


def build(folder: Path, work: Path) -> list[Path]:
    """Build the libraries into `folder`. Raises RuntimeError if there is no compiler or it fails.

    `work` is an existing folder for intermediate files.
    """
    compiler = find_compiler(work)
    if compiler is None:
        raise RuntimeError(
            "No C++20 compiler was found to build fp8scope's CPU kernels. Install one (Debian: apt-get "
            f"install g++), or run: pip install {compilers.ZIG}. To build without the kernels, set "
            "FP8SCOPE_BUILD_KERNELS=0; quantisation on CPUs then runs in eager torch, several times slower."
        )
    print(f"building the CPU kernels with {compiler.name}", flush=True)
    stamp = f'-DFP8SCOPE_SOURCES="{levels.digest()}"'

    def build_level(level: Any) -> Path:
        library = work / f"{level.module}.so"
        compiler.build(levels.SOURCES / "kernels.cpp", library, (*FLAGS, stamp, *level.flags))
        return library

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(build_level, levels.levels(architecture())))
    folder.mkdir(parents=True, exist_ok=True)
    # Rename into place: a process that has loaded the old file keeps using it.
    targets = [folder / library.name for library in built]
    for library, target in zip(built, targets, strict=True):
        unfinished = target.with_suffix(".new")
        unfinished.write_bytes(library.read_bytes())
        unfinished.chmod(0o755)
        unfinished.replace(target)
    return targets


if __name__ == "__main__":
    if not wanted():
        sys.exit("There are no CPU kernels for this platform, or FP8SCOPE_BUILD_KERNELS=0.")
    with tempfile.TemporaryDirectory(prefix="fp8scope-") as temporary:
        for target in build(PACKAGE, Path(temporary)):
            print(target.relative_to(ROOT))
