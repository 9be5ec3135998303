"""A check that Triton's kernels can run in this process."""

import os
from functools import cache
from importlib.util import find_spec

from fp8scope_kernels.devices import TRITON_DEVICES, accelerators


@cache
def is_installed() -> bool:
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter: on any device, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require() -> None:
    """Raise RuntimeError, with instructions, if no Triton kernel can run."""
    if not is_installed():
        raise RuntimeError("The triton backend needs Triton: pip install triton")
    if not (any(device.type in TRITON_DEVICES for device in accelerators()) or is_interpreted()):
        raise RuntimeError(
            "The triton backend needs a CUDA or ROCm device. To try it on a CPU, slowly, start Python with "
            "TRITON_INTERPRET=1 in the environment."
        )
