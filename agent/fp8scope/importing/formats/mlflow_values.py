"""Parameters, tags, states and numbers, as both stores of MLflow have them."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from fp8scope.importing.limits import MAX_ENTRIES
from fp8scope.importing.model import EndState
from fp8scope.importing.values import from_text

LARGEST: Final = sys.float_info.max
"""Stands for infinity in the SQL store."""
STATES: Final[Mapping[str, EndState]] = {
    **{"FINISHED": "finished", "FAILED": "failed", "KILLED": "failed", "RUNNING": "running"},
    **{"SCHEDULED": "running", "1": "running", "2": "running", "3": "finished", "4": "failed", "5": "failed"},
}


def config_of(params: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The parameters as a configuration, with numbers as numbers."""
    config: dict[str, Any] = {}
    for name, value in params:
        if len(config) < MAX_ENTRIES:
            config[name] = from_text(value)
    return config


def tags_of(tags: Mapping[str, str]) -> list[str]:
    """The tags of people as `name=value`; those of MLflow are left out."""
    return [f"{name}={value}"[:64] for name, value in sorted(tags.items()) if not name.startswith("mlflow.")][
        :100
    ]


def state_of(status: Any) -> EndState:
    """The state of a run, of its name or number in MLflow."""
    return STATES.get(str(status), "finished")


def failure_of(status: Any) -> str:
    """The text of a run that failed."""
    return f"MLflow has the run as {status}." if state_of(status) == "failed" else ""
