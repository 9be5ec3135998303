"""The choice of the backend that quantises: eager torch, C++ on CPUs, or Triton on CUDA devices.

`reference` is the definition and needs only torch. `compiled` is C++ for CPUs, built with the package.
`triton` is for CUDA devices. All compute the same bits. `auto`, the default, takes `compiled` for tensors on
a CPU and `triton` for tensors on a CUDA device, where they can be loaded. If a backend fails under `auto`,
one warning says why and `reference` replaces it for the rest of the process.
"""

import warnings
from collections.abc import Callable
from typing import Literal, TypeVar

from torch import Tensor

from fp8scope_kernels.cpu import library as cpu_library
from fp8scope_kernels.plain_tensors import is_plain
from fp8scope_kernels.triton import availability as triton_availability

Backend = Literal["auto", "reference", "compiled", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "compiled", "triton")

Result = TypeVar("Result")

_chosen: Backend = "auto"
_cpu_failure: str | None = None
_triton_failure: str | None = None


def set_backend(backend: Backend) -> None:
    """Choose `auto`, `reference`, `compiled` or `triton` for this process.

    Tensors on a device that the chosen backend does not support are quantised by `reference`. Raises
    ValueError for any other name, and RuntimeError if `triton` cannot run or the library of `compiled` cannot
    be loaded.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    global _chosen, _cpu_failure
    if backend == "triton":
        triton_availability.require()
    if backend == "compiled":
        try:
            cpu_library.library()
        except RuntimeError as error:
            raise RuntimeError(f"The compiled backend cannot be used: {error}.") from error
        _cpu_failure = None
    _chosen = backend


def get_backend() -> Backend:
    """The chosen backend; `reference` once the compiled kernels have failed to load."""
    return "reference" if _cpu_failure else _chosen


def failures() -> tuple[str, ...]:
    """Why backends were given up in this process: one message for each."""
    return tuple(failure for failure in (_cpu_failure, _triton_failure) if failure)


def use_compiled(x: Tensor) -> bool:
    """Whether the compiled kernels quantise this tensor. If so, they are loaded."""
    if not x.is_cpu or _cpu_failure or _chosen == "reference" or not is_plain(x):
        return False
    return cpu_library.is_loaded() or _load()


def _load() -> bool:
    global _cpu_failure
    try:
        cpu_library.library()
    except Exception as error:  # training must go on
        _cpu_failure = str(error)
        warnings.warn(
            "Quantisation on the CPU runs in eager torch, with the same results but several times slower, "
            f"because the compiled kernels cannot be used: {_cpu_failure}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def use_triton(x: Tensor) -> bool:
    """Whether the Triton kernels quantise this tensor: if chosen, or on CUDA devices under `auto`."""
    if _chosen == "triton":
        return x.is_cuda or (x.is_cpu and triton_availability.is_interpreted())
    return _chosen == "auto" and x.is_cuda and _triton_failure is None and triton_availability.is_installed()


def attempt_triton(launch: Callable[[], Result]) -> Result | None:
    """Return what `launch` returns. If Triton fails under `auto`, warn once and return None.

    Raises ValueError, which is a wrong argument, and any exception where `triton` was chosen. Kernels write
    statistics in their last launch, so that quantising again after a failure counts nothing twice.
    """
    global _triton_failure
    try:
        return launch()
    except ValueError:
        raise
    except Exception as error:  # any error of Triton's compiler: training must go on
        if _chosen == "triton":
            raise
        _triton_failure = f"{type(error).__name__}: {error}"
        warnings.warn(
            "Quantisation continues in eager torch, because Triton failed "
            f"({_triton_failure.splitlines()[0]}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
