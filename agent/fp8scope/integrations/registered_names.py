"""The name `fp8scope` where frameworks take the names of loggers; in `fp8scope run`, without a line of code.

`report_to="fp8scope"` of Transformers' trainers, `log_with="fp8scope"` of Accelerate, and
`--logger_name fp8scope` of litgpt. verl finds the name by itself: see `fp8scope.integrations.verl`.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

from fp8scope.process.import_hook import when_imported

NAME = "fp8scope"


def register() -> Callable[[], None]:
    """Add the name to the frameworks that the program imports. Returns a function that adds it to no more."""
    cancels = [
        when_imported("transformers.integrations.integration_utils", _in_transformers),
        when_imported("accelerate.tracking", _in_accelerate),
        when_imported("litgpt.types", _in_types_of_litgpt),
        when_imported("litgpt.utils", _in_litgpt),
    ]

    def cancel() -> None:
        for cancel_import in cancels:
            cancel_import()

    return cancel


def _in_transformers() -> None:
    # `fp8scope run` adds its own callback to the trainer: the name needs one that does nothing.
    module: Any = sys.modules["transformers.integrations.integration_utils"]
    nothing = type(
        "Fp8scopeReport", (module.TrainerCallback,), {"__doc__": "Leaves the trainer to fp8scope."}
    )
    module.INTEGRATION_TO_CALLBACK.setdefault(NAME, nothing)


def _in_accelerate() -> None:
    importlib.import_module("fp8scope.integrations.accelerate")


def _in_types_of_litgpt() -> None:
    # Before other modules of litgpt import the type, by which its command line checks the name.
    types: Any = sys.modules["litgpt.types"]
    types.LoggerChoice = Literal[(*get_args(types.LoggerChoice), NAME)]


def _in_litgpt() -> None:
    utils: Any = sys.modules["litgpt.utils"]
    original = utils.choose_logger

    @functools.wraps(original)
    def choose_logger(logger_name: str, *args: Any, **kwargs: Any) -> Any:
        if logger_name != NAME:
            return original(logger_name, *args, **kwargs)
        # Needs Lightning, which litgpt has.
        return importlib.import_module("fp8scope.integrations.fabric").Fp8scopeLogger()

    utils.choose_logger = choose_logger
