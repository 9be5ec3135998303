"""Which code quantises on a CPU: eager torch, or the same arithmetic as C++ that counts while it casts.

`reference` is the definition and needs nothing but torch. `compiled` computes the same bits several times
faster, with a library that is built when the package is. `auto`, the default, takes it where it can be
loaded. Where it cannot, one warning says so and `reference` takes over for the rest of the process.
"""

import warnings
from typing import Literal

from torch import Tensor

from fp8scope_kernels.cpu import library as cpu_library

Backend = Literal["auto", "reference", "compiled", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "compiled", "triton")

_chosen: Backend = "auto"
_failure: str | None = None


def set_backend(backend: Backend) -> None:
    """Choose `auto`, `reference`, `compiled` or `triton` for this process.

    `triton` is for CUDA devices, where `auto` takes it too if it is installed. Tensors on a device that the
    chosen backend does not know are left to `reference`. Raises ValueError for any other name, and
    RuntimeError where `triton` cannot run or the library of `compiled` cannot be loaded.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if backend == "triton":
        # Imported here, because it asks this module what was chosen.
        from fp8scope_kernels.triton import availability as triton_availability

        triton_availability.require()
    global _chosen, _failure
    if backend == "compiled":
        try:
            cpu_library.library()
        except RuntimeError as error:
            raise RuntimeError(f"The compiled backend cannot be used: {error}.") from error
        _failure = None
    _chosen = backend


def get_backend() -> Backend:
    """The backend chosen; `reference` once loading the compiled kernels has failed."""
    return "reference" if _failure else _chosen


def failure() -> str | None:
    """Why the compiled kernels could not be loaded, or None."""
    return _failure


def use_compiled(x: Tensor) -> bool:
    """Whether this tensor is to be quantised by the compiled kernels, which are then ready to be called."""
    if not x.is_cpu or _failure or _chosen == "reference":
        return False
    return cpu_library.is_loaded() or _load()


def _load() -> bool:
    global _failure
    try:
        cpu_library.library()
    except Exception as error:  # training must go on
        _failure = str(error)
        warnings.warn(
            "Quantisation on the CPU runs in eager torch, with the same results but several times slower, "
            f"because the compiled kernels cannot be used: {_failure}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
