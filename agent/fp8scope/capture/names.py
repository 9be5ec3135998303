"""Names of captured values, as the wire takes them and apart from those that the agent measures itself."""

import re
from collections.abc import Mapping
from typing import Any

from fp8scope.recording.entries import LOGGED_PREFIX
from fp8scope.step import valid_name

STEP_PREFIX = "tracker_step/"
"""Begins the names under which the steps of the trackers are recorded."""
_MEASURED = re.compile(
    r"(?:tokens|tokens_per_second|step_seconds|time_(?:data|forward|backward|optimizer|other)|mfu|hfu|data_hash"
    r"|skipped_steps|(?:model|hardware)_flops_per_second|launch_bound_seconds|plain_tensors_every|measured_every"
    r"|grad_norm_(?:applied|local)|(?:memory|gpu)_\w+|(?:anatomy|fp8_gradients|optimizer_state|tracker_step"
    r"|logged)/.*)"
)
_TRAINED = re.compile(r"(?:loss|learning_rate|grad_norm|learning_rate/group\d+)")
"""Names of values that the agent measures where it follows an optimizer."""


def recorded_name(name: str, *, follows: bool) -> str:
    """Return the name under which a captured value is recorded: its own where that is possible.

    `follows`: the agent follows the training, and measures its loss, learning rate and gradient norm.
    """
    valid = valid_name(name)
    if _MEASURED.fullmatch(valid) or (follows and _TRAINED.fullmatch(valid)):
        return f"{LOGGED_PREFIX}{valid}"[:128]
    return valid


def name_in_context(name: str, context: Mapping[Any, Any]) -> str:
    """Return the name of a value that Aim keeps for a context: `val/loss` for {"subset": "val"}.

    The context is in the order of its keys, as Aim stores it.
    """
    return "/".join((*(str(context[key]) for key in sorted(context, key=str)), name))
