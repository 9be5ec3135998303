"""Whether Triton's kernels can run here, and what happens when they fail."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from fp8scope_kernels import backends

Result = TypeVar("Result")

_failure: str | None = None


def failure() -> str | None:
    """Why Triton was given up, or None."""
    return _failure


@cache
def is_installed() -> bool:
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which is for tests: on any device, and slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require() -> None:
    """Raise RuntimeError, which says what to do, where no Triton kernel can run."""
    if not is_installed():
        raise RuntimeError("The triton backend needs Triton: pip install triton")
    if not (torch.cuda.is_available() or is_interpreted()):
        raise RuntimeError(
            "The triton backend needs a CUDA device. To try it on a CPU, slowly, start Python with "
            "TRITON_INTERPRET=1 in the environment."
        )


def wants(x: Tensor) -> bool:
    """Whether this tensor is to be quantised by the Triton kernels: where chosen, or on CUDA under `auto`."""
    if backends._chosen == "triton":
        return x.is_cuda or (x.is_cpu and is_interpreted())
    return backends._chosen == "auto" and x.is_cuda and _failure is None and is_installed()


def attempt(launch: Callable[[], Result]) -> Result | None:
    """What `launch` returns; None, after one warning, where Triton fails without having been asked for.

    Kernels write statistics with their last launch, so that what follows a failure counts nothing twice.
    """
    global _failure
    try:
        return launch()
    except ValueError:
        raise
    except Exception as error:  # whatever the compiler says, training must go on
        if backends._chosen == "triton":
            raise
        _failure = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"Quantisation goes on in eager torch, because Triton failed ({_failure.splitlines()[0]}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
