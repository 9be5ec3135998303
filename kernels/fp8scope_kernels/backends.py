"""The choice of the backend that quantises: eager torch, C++ on CPUs, or Triton on GPUs.

`reference` is the definition and needs only torch. `compiled` is C++ for CPUs, built with the package.
`triton` is for CUDA and ROCm devices. All compute the same bits. `auto`, the default, takes `compiled` for
tensors on a CPU and `triton` for tensors on these GPUs, where they can be loaded, and `reference` on other
accelerators. If a backend fails under `auto`, one warning says why and `reference` replaces it for the rest
of the process: all of `compiled`, which is one library, but only the kernel of `triton` that has failed,
because each is compiled by itself.
"""

import warnings
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fp8scope_kernels.cpu import library as cpu_library
from fp8scope_kernels.devices import TRITON_DEVICES
from fp8scope_kernels.plain_tensors import is_plain
from fp8scope_kernels.triton import availability as triton_availability

Backend = Literal["auto", "reference", "compiled", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "compiled", "triton")

TritonKernel = Literal[
    "measure",
    "observe",
    "quantize",
    "quantize_at_random",
    "quantize_blocks",
    "delayed_scale",
    "current_scale",
]
"""The functions of triton/backend.py that launch kernels."""

Result = TypeVar("Result")

_chosen: Backend = "auto"
_cpu_failure: str | None = None
_triton_failures: dict[TritonKernel, str] = {}


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
    """Return why backends were given up in this process.

    One message for each, and for each kernel of Triton.
    """
    kernels = [f"{kernel}: {failure}" for kernel, failure in _triton_failures.items()]
    return (*((_cpu_failure,) if _cpu_failure else ()), *kernels)


def use_compiled(x: Tensor) -> bool:
    """Return whether the compiled kernels quantise this tensor. If so, they are loaded."""
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


def use_triton(x: Tensor, kernel: TritonKernel) -> bool:
    """Return whether this Triton kernel takes this tensor: if chosen, or on GPUs under `auto`."""
    if _chosen == "triton":
        runs = x.device.type in TRITON_DEVICES or (x.is_cpu and triton_availability.is_interpreted())
        return runs and is_plain(x)
    if _chosen != "auto" or x.device.type not in TRITON_DEVICES or kernel in _triton_failures:
        return False
    return triton_availability.is_installed() and is_plain(x)


def attempt_triton(kernel: TritonKernel, launch: Callable[[], Result]) -> Result | None:
    """Return what `launch` returns. If it fails under `auto`, warn, give up this kernel and return None.

    Raises ValueError, which is a wrong argument, torch's OutOfMemoryError, after which a script may go on
    with smaller batches, and any exception where `triton` was chosen. Kernels write statistics in their last
    launch, so that quantising again after a failure counts nothing twice.
    """
    try:
        return launch()
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error of Triton's compiler: training must go on
        if _chosen == "triton":
            raise
        _triton_failures[kernel] = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{kernel} continues in eager torch, with the same results, because its Triton kernel failed "
            f"({_triton_failures[kernel].splitlines()[0]}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
