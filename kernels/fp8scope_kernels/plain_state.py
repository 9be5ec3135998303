"""Checkpoints of FP8 models for models in high precision."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from fp8scope_kernels.recipes import ROLES
from fp8scope_kernels.scaling_state import STATE

SCALING_KEY = re.compile(
    rf"(^|\.)(scaling|fp8_scaling\.\w+)\."
    rf"(({'|'.join(ROLES)})\.({'|'.join(STATE)}|_extra_state)|rounding\.state)$"
)
"""Keys of the scaling state of `Fp8Linear` layers, of this version and older ones, and of random rounding."""


def plain_state_dict(model: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """The `state_dict` of a model without scaling state: the keys, and the tensors, of a BF16 model.

    It loads strictly into the model before `convert`. Takes a `state_dict` that was saved, too.
    """
    saved = model.state_dict() if isinstance(model, nn.Module) else model
    plain: Any = OrderedDict((key, value) for key, value in saved.items() if not SCALING_KEY.search(key))
    versions = getattr(saved, "_metadata", None)
    if versions is not None:
        plain._metadata = OrderedDict(
            (path, version) for path, version in versions.items() if not _is_scaling(path)
        )
    return plain  # type: ignore[no-any-return]


def _is_scaling(path: str) -> bool:
    """Return whether this is the path of scaling states, or of the container that has them."""
    of_tensor = rf"(^|\.)(scaling|fp8_scaling\.\w+)\.({'|'.join(ROLES)}|rounding)$"
    return (
        re.search(of_tensor, path) is not None or re.search(r"(^|\.)fp8_scaling(\.\w+)?$", path) is not None
    )
