"""The CPU's kernels: native.cpp, built once per process with the C++ compiler found, called with ctypes.

Why C++ and not a compiled graph: torch.compile's CPU code counts in the lanes of what it casts from
(float32), and that costs 60 % of the cast. Counting in the bytes that were written costs a tenth of it, the
cast itself takes half the time, and building takes a second instead of ten. The library is not kept on disk:
a folder that others can write to, or a home shared by different processors, is a way to load the wrong one.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels.formats import Format
from fp8scope_kernels.recipes import MXFP8, Block, Recipe

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
BUILD_SECONDS = 120
ELEMENTS_PER_THREAD = 2**16
"""Fewer are not worth waking a thread for."""

COUNTS, AMAX = 1, 2


class _Format(ctypes.Structure):
    _fields_ = (
        ("max", ctypes.c_float),
        ("smallest_normal", ctypes.c_float),
        ("smallest_subnormal", ctypes.c_float),
        ("mantissa_bits", ctypes.c_int32),
        ("bias", ctypes.c_int32),
        ("nan", ctypes.c_int32),
        ("max_exponent", ctypes.c_int32),
    )


class _Counts(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("zeros", "flushed", "below", "saturated", "nonfinite", "blocks")
        ),
        *((name, ctypes.c_float) for name in ("smallest", "median", "largest")),
    )


class Quantized(NamedTuple):
    """What one pass found: `data` is q; the numbers are 0 where they were not asked for.

    `amax` is Inf or NaN if an element is, except from `quantize_blocks`, which leaves those out. `underflow`,
    `subnormal`, `saturated` and `nonfinite` are elements; `quantize` leaves the latter two to `inspect`.
    """

    data: Tensor
    amax: float
    underflow: int
    subnormal: int
    saturated: int
    nonfinite: int


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
        raise RuntimeError("No C++ compiler was found on the PATH.")
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
                return _declared(ctypes.CDLL(target))
    raise RuntimeError(f"{command} failed: {done.stderr.strip()[-2000:]}")


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    signatures = {
        "measure": (pointer, size, number, number),
        "inspect": (pointer, size, number, real, real, pointer),
        "quantize": (pointer, pointer, size, number, number, real, pointer, number, number, pointer),
        "quantize_blocks": (
            *(pointer, pointer, pointer, size, size, size, size),
            *(number, number, number, pointer, number, number, pointer),
        ),
    }
    for name, arguments in signatures.items():
        function = getattr(lib, f"fp8scope_{name}")
        function.argtypes, function.restype = arguments, real
    lib.fp8scope_accumulate_blocks.argtypes = (pointer, size, pointer)
    lib.fp8scope_accumulate_blocks.restype = None
    lib.fp8scope_accumulate.argtypes, lib.fp8scope_accumulate.restype = (
        (pointer, size, real, real, pointer),
        None,
    )
    return lib


def measure(x: Tensor) -> float:
    """Max of abs(x), 0 for an empty tensor; Inf or NaN if an element is."""
    x = _readable(x)
    result: float = library().fp8scope_measure(x.data_ptr(), x.numel(), _is_wide(x), _threads(x))
    return result


def inspect(x: Tensor, scale: float, limit: float) -> tuple[float, int, int]:
    """Of the finite elements the max of abs(x) and how many have abs(x * scale) > limit; how many others."""
    x, counts = _readable(x), _Counts()
    amax: float = library().fp8scope_inspect(
        x.data_ptr(), x.numel(), _is_wide(x), scale, limit, ctypes.byref(counts)
    )
    return amax, counts.saturated, counts.nonfinite


def quantize(x: Tensor, scale: float, format: Format, dtype: torch.dtype, wanted: int = COUNTS) -> Quantized:
    """x [any shape] times `scale`, clamped and rounded, in the format's dtype or in bfloat16.

    `wanted`: COUNTS (underflow and subnormal; saturation is left to `inspect`), AMAX, both or neither.
    """
    x, counts = _readable(x), _Counts()
    data = torch.empty(x.shape, dtype=dtype)
    amax = library().fp8scope_quantize(
        *(x.data_ptr(), data.data_ptr(), x.numel(), _is_wide(x), dtype.itemsize == 1),
        *(scale, ctypes.byref(_parameters(format)), wanted, _threads(x), ctypes.byref(counts)),
    )
    return _result(data, amax, counts)


def quantize_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    dtype: torch.dtype,
    row: Tensor | None,
    block_row: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The matrix x, which has elements, in blocks of `grid` (no zeros): q in `dtype`, and the blocks' scales.

    Scales are float32 [block rows, 1, block columns, 1]. Statistics are added to the rows.
    """
    x, counts = _readable(x), _Counts()
    (rows, columns), (height, width) = x.shape, grid
    data = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty(-(-rows // height), 1, -(-columns // width), 1)
    if isinstance(recipe, MXFP8):
        rule = 2 if recipe.rounding == "floor" else 1
    else:
        rule = int(getattr(recipe, "power_of_two", False))
    counting = row is not None or block_row is not None
    amax = library().fp8scope_quantize_blocks(
        *(x.data_ptr(), data.data_ptr(), scales.data_ptr(), rows, columns, height, width, _is_wide(x)),
        *(dtype.itemsize == 1, rule, ctypes.byref(_parameters(format)), counting, _threads(x)),
        ctypes.byref(counts),
    )
    if row is not None:
        found = _result(data, amax, counts)
        numbers = (found.saturated, found.underflow, found.subnormal, found.nonfinite)
        accumulate(row, x.numel(), amax, counts.median, numbers)
    if block_row is not None:
        with _writable(block_row) as target:
            library().fp8scope_accumulate_blocks(target.data_ptr(), scales.numel(), ctypes.byref(counts))
    return data, scales


def accumulate(
    row: Tensor, elements: int, amax: float, scale: float, counts: tuple[int, int, int, int]
) -> None:
    """Add one call to a row of statistics; `counts` are saturated, underflow, subnormal, nonfinite."""
    # Here, because seven operations on tensors would take as long as counting in a million elements.
    numbers = (ctypes.c_int64 * len(counts))(*counts)
    with _writable(row) as target:
        library().fp8scope_accumulate(target.data_ptr(), elements, amax, scale, numbers)


@contextmanager
def _writable(row: Tensor) -> Iterator[Tensor]:
    """The row, or a copy that is written back, as contiguous float64."""
    target = row.double().contiguous()
    yield target
    if target is not row:
        row.copy_(target)


def _result(data: Tensor, amax: float, counts: _Counts) -> Quantized:
    zeros, flushed, below = counts.zeros, counts.flushed, counts.below
    return Quantized(data, amax, flushed - zeros, below - flushed, counts.saturated, counts.nonfinite)


def _readable(x: Tensor) -> Tensor:
    x = x.detach()
    return (x if x.dtype in (torch.bfloat16, torch.float32) else x.float()).contiguous()


def _is_wide(x: Tensor) -> bool:
    return x.dtype == torch.float32


def _threads(x: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // ELEMENTS_PER_THREAD))


@cache
def _parameters(format: Format) -> _Format:
    # NaN has all bits set below the sign, in E4M3 and as torch writes it in E5M2.
    return _Format(
        *(format.max, format.smallest_normal, format.smallest_subnormal),
        *(format.mantissa_bits, format.bias, 0x7F, format.max_exponent),
    )
