"""Which code quantises on a CPU: eager torch, or the same arithmetic as C++ that counts while it casts.

`reference` is the definition and needs nothing but torch. `compiled` computes the same bits several times
faster, but needs a C++ compiler and takes a second or two before its first result. `auto`, the default,
builds it at the first tensor for which that is worth while, where a compiler is found, and takes it for all
from then on. If building fails, one warning says so and `reference` takes over for the rest of the process.
"""

import warnings
from typing import Literal

from torch import Tensor

from fp8scope_kernels import native_library

Backend = Literal["auto", "reference", "compiled", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "compiled", "triton")

AUTO_ELEMENTS = 2**16
"""From this size on `auto` builds: eager torch takes a millisecond for such a layer's tensors, every time."""

_chosen: Backend = "auto"
_failure: str | None = None


def set_backend(backend: Backend) -> None:
    """Choose `auto`, `reference`, `compiled` or `triton` for this process.

    `triton` is for CUDA devices, where `auto` takes it too if it is installed. Tensors on a device that the
    chosen backend does not know are left to `reference`. Raises ValueError for any other name, and
    RuntimeError where `triton` cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if backend == "triton":
        # Imported here, because it asks this module what was chosen.
        from fp8scope_kernels import triton_support

        triton_support.require()
    global _chosen
    _chosen = backend


def get_backend() -> Backend:
    """The backend chosen; `reference` once building has failed."""
    return "reference" if _failure else _chosen


def failure() -> str | None:
    """Why building failed, or None."""
    return _failure


def has_compiler() -> bool:
    """Whether there is a C++ compiler: $CXX, or one on the PATH."""
    return native_library.compiler() is not None


def use_compiled(x: Tensor) -> bool:
    """Whether this tensor is to be quantised by the compiled kernels, which are then ready to be called."""
    if not x.is_cpu or _failure or _chosen == "reference":
        return False
    if native_library.is_built():
        return True
    if _chosen == "auto" and (x.numel() < AUTO_ELEMENTS or not has_compiler()):
        return False
    return _build()


def _build() -> bool:
    global _failure
    try:
        native_library.library()
    except Exception as error:  # whatever the compiler says, training must go on
        _failure = f"{type(error).__name__}: {error}"
        warnings.warn(
            "Quantisation goes on in eager torch, with the same results but slower, because building the C++ "
            f"kernels failed ({_failure.splitlines()[0]}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
