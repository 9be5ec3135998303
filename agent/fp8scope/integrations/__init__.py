"""Callbacks and loggers for frameworks that own the training loop; each module imports its framework.

A module is imported when it is first used, so that `fp8scope.integrations.transformers.Fp8scopeCallback`
needs no import but `import fp8scope`.
"""

import importlib
from types import ModuleType

_FRAMEWORKS = (
    *(
        "accelerate",
        "composer",
        "deepspeed",
        "fabric",
        "lightning",
        "megatron",
        "ray",
        "torchtitan",
        "torchtune",
    ),
    *("transformers", "verl"),
)


def __getattr__(name: str) -> ModuleType:
    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
