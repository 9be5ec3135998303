"""Finds, checks and loads the CPU kernels' library, which is built with the package.

Nothing is compiled or written here; loading takes milliseconds.
"""

import ctypes
import os
import threading
from pathlib import Path

from fp8scope_kernels.cpu import levels as cpu_levels
from fp8scope_kernels.cpu.levels import Level
from fp8scope_kernels.torch_internals import torch_library_path

POINTER, SIZE, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "scale": ((REAL, REAL, NUMBER, REAL), REAL),
    "past_scale": ((POINTER, SIZE, POINTER, POINTER, SIZE, REAL), REAL),
    "remember": ((POINTER, SIZE, POINTER, REAL), None),
    "measure": ((POINTER, SIZE, NUMBER, NUMBER), REAL),
    "observe": ((POINTER, SIZE, SIZE, NUMBER, NUMBER, POINTER), SIZE),
    "squares": ((POINTER, POINTER, SIZE), ctypes.c_double),
    "inspect": ((POINTER, SIZE, NUMBER, REAL, REAL, POINTER), REAL),
    "quantize": (
        (
            *(POINTER, POINTER, SIZE, NUMBER, NUMBER, REAL, POINTER, NUMBER, NUMBER),
            *(REAL, POINTER, POINTER, POINTER),
        ),
        REAL,
    ),
    "quantize_blocks": (
        (*(POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE),)
        + (*(NUMBER, NUMBER, NUMBER, POINTER, NUMBER, POINTER, POINTER, POINTER),),
        None,
    ),
    "round_blocks": (
        (*(POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE),)
        + (*(NUMBER, NUMBER, NUMBER, POINTER, NUMBER, POINTER, POINTER),),
        None,
    ),
    "quantize_columns": (
        (*(POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, NUMBER, NUMBER, NUMBER, NUMBER, POINTER, NUMBER),),
        None,
    ),
    "quantize_nvfp4": (
        (*(POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE, NUMBER, REAL),)
        + (*(POINTER, POINTER, NUMBER, POINTER, POINTER, POINTER),),
        None,
    ),
    "rotate": ((POINTER, POINTER, SIZE, SIZE, NUMBER, ctypes.c_uint32, NUMBER), None),
    "dequantize_blocks": ((*(POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE), *(NUMBER,) * 3), None),
    "exponents": ((POINTER, SIZE, NUMBER, NUMBER, POINTER), None),
    "sample": ((POINTER, POINTER, POINTER, SIZE, SIZE, NUMBER, NUMBER, POINTER), None),
    "scale_product": ((POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, NUMBER, NUMBER), None),
}
"""Argument and result types of the functions of csrc/kernels.cpp, by name without the prefix `fp8scope_`."""

REBUILD = "run pip install -e . (or make install) in the source tree"

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_forked = False


def library() -> ctypes.CDLL:
    """The library for the highest level that this processor supports; loaded at the first call.

    FP8SCOPE_CPU_LEVEL selects a lower level. Raises RuntimeError, with instructions, if there is none.
    """
    global _library
    with _lock:
        if _library is None:
            _library = load(os.environ.get("FP8SCOPE_CPU_LEVEL"))
        return _library


def is_loaded() -> bool:
    return _library is not None


def available_levels() -> tuple[Level, ...]:
    """The levels that this processor can run, lowest first. Raises RuntimeError as `library` does."""
    levels = cpu_levels.levels()
    if not levels:
        raise RuntimeError("there are none for this platform, only for Linux and macOS on x86-64 or arm64")
    return levels[: _open(levels[0]).fp8scope_level() + 1]


def load(name: str | None = None) -> ctypes.CDLL:
    """The library of the named level, or of the highest. Raises RuntimeError if it cannot be used."""
    levels = available_levels()
    level = levels[-1]
    if name:
        matching = [supported for supported in levels if supported.name == name]
        if not matching:
            known_names = ", ".join(supported.name for supported in levels)
            raise RuntimeError(f"FP8SCOPE_CPU_LEVEL must be one of {known_names}, got {name!r}")
        (level,) = matching
    loaded = _open(level)
    if not _forked:
        loaded.fp8scope_use_team(_openmp_team())
    return loaded


def _open(level: Level) -> ctypes.CDLL:
    path = cpu_levels.path(level)
    if not path.exists():
        raise RuntimeError(f"{path.name} was not built with the package; {_advice(path)}")
    try:
        opened = ctypes.CDLL(str(path))
        opened.fp8scope_sources.restype = ctypes.c_char_p
        sources = opened.fp8scope_sources().decode()
        # An installed package has no sources. In a source tree they may have changed since the build.
        if sources != (cpu_levels.digest() or sources):
            raise RuntimeError(f"{path.name} was built from other sources; {REBUILD}")
        return _declared(opened)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path.name} cannot be loaded ({error}); {_advice(path)}") from error


def _advice(path: Path) -> str:
    if cpu_levels.sources():
        return REBUILD
    return "reinstall fp8scope from a wheel for this platform, or from source with a C++ compiler"


def _declared(opened: ctypes.CDLL) -> ctypes.CDLL:
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(opened, f"fp8scope_{name}")
        function.argtypes, function.restype = arguments, result
    opened.fp8scope_use_team.argtypes, opened.fp8scope_use_team.restype = (POINTER,), None
    return opened


def _openmp_team() -> int | None:
    """The address of GOMP_parallel in torch's OpenMP runtime; None if torch has no such runtime."""
    try:
        # torch is already loaded. The symbol is also searched in the libraries that torch depends on.
        torch_library = ctypes.CDLL(torch_library_path)
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _after_fork() -> None:
    """Use one thread in a forked child: OpenMP's threads do not exist there, and it would wait for them."""
    global _forked, _lock
    _forked, _lock = True, threading.Lock()
    if _library is not None:
        _library.fp8scope_use_team(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
