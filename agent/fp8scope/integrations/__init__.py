"""Callbacks for trainers that own the training loop; each module imports its trainer's package.

A module is imported when it is first used, so that `fp8scope.integrations.transformers.Fp8scopeCallback`
needs no import but `import fp8scope`.
"""

import importlib
from types import ModuleType

_TRAINERS = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _TRAINERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
