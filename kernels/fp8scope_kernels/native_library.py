"""native.cpp as a library: built once per process with the C++ compiler found, loaded with ctypes.

The library is not kept on disk: a folder that others can write to, or a home shared by different processors,
is a way to load the wrong one.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
BUILD_SECONDS = 120


@cache
def compiler() -> str | None:
    """The C++ compiler: $CXX, else the first found on the PATH; None if there is none."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """The kernels, built at the first call. Raises RuntimeError with what the compiler said if that fails."""
    global _library
    with _lock:
        if _library is None:
            _library = _build()
        return _library


def is_built() -> bool:
    return _library is not None


def _build() -> ctypes.CDLL:
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler was found; install g++ or clang++, or let CXX name one")
    with tempfile.TemporaryDirectory(prefix="fp8scope-") as folder:
        target = str(Path(folder) / "native.so")
        # Some compilers have no OpenMP: one thread is still better than none.
        for extra in (("-fopenmp",), ()):
            done = subprocess.run(
                (command, *FLAGS, *extra, "-shared", "-fPIC", "-o", target, str(SOURCE)),
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
                check=False,
            )
            if done.returncode == 0:
                return _declared(_load(target))
    raise RuntimeError(f"{command} failed: {done.stderr.strip()[-2000:]}")


def _load(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        # Temporary folders may be mounted such that nothing in them can be run.
        raise RuntimeError(f"{error}; let TMPDIR name a folder that libraries can be loaded from") from error


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    signatures = {
        "scale": (real, real, number, real),
        "past_scale": (pointer, size, pointer, pointer, size, real),
        "remember": (pointer, size, pointer, real),
        "measure": (pointer, size, number, number),
        "inspect": (pointer, size, number, real, real, pointer),
        "quantize": (
            *(pointer, pointer, size, number, number, real, pointer, number, number),
            *(real, pointer, pointer),
        ),
        "quantize_blocks": (
            *(pointer, pointer, pointer, size, size, size, size),
            *(number, number, number, pointer, number, pointer, pointer),
        ),
        "dequantize_blocks": (pointer, pointer, pointer, size, size, size, size, number, number),
        "sample": (pointer, pointer, pointer, size, size, number, number, pointer),
        "scale_product": (pointer, pointer, pointer, pointer, size, size, number, number),
    }
    for name, arguments in signatures.items():
        function = getattr(lib, f"fp8scope_{name}")
        returns = name in ("scale", "past_scale", "measure", "inspect", "quantize")
        function.argtypes, function.restype = arguments, real if returns else None
    return lib
