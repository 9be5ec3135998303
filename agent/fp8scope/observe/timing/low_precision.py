"""The scalars of training state in few bits: gradients reduced in FP8, and what an optimizer stores.

After Peng et al., "FP8-LM: Training FP8 Large Language Models" (2023).
"""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from fp8scope_kernels import Fp8GradientReducer

MAX_KEYS: Final = 8
"""The most kinds of tensors of an optimizer's state that are sent, the largest."""
SCALES: Final = "scales"


class LowPrecisionState:
    """Reads reducers in every step, and an optimizer's state when it has got other tensors."""

    def __init__(self) -> None:
        self._stored: dict[int, int] = {}
        self._of_models: set[tuple[int, int]] = set()
        """Reducers of parameters of the models, and the number of their parameters."""

    def scalars(
        self, models: "Iterable[torch.nn.Module]", optimizers: "Iterable[torch.optim.Optimizer]"
    ) -> dict[str, Any]:
        """Return numbers, and tensors of one element on the device of the gradients."""
        scalars: dict[str, Any] = {}
        # Nobody has made a reducer if nobody has imported it.
        module = sys.modules.get("fp8scope_kernels.gradient_reduction")
        if module is not None and (reducers := module.live_reducers()):
            reducer = next((reducer for reducer in reducers if self._is_of(reducer, models)), None)
            if reducer is not None:
                scalars |= reduced_gradients(reducer)
        for optimizer in optimizers:
            if self._stored.get(id(optimizer)) != len(optimizer.state):
                self._stored[id(optimizer)] = len(optimizer.state)
                scalars |= stored_state(optimizer)
        return scalars

    def _is_of(self, reducer: "Fp8GradientReducer", models: "Iterable[torch.nn.Module]") -> bool:
        """Return whether the reducer averages gradients of these models."""
        key = (id(reducer), len(reducer.parameters))
        if key not in self._of_models and any(
            reducer.parameters[0] is parameter for model in models for parameter in model.parameters()
        ):
            self._of_models.add(key)
        return key in self._of_models


def reduced_gradients(reducer: "Fp8GradientReducer") -> dict[str, Any]:
    """Return the scalars of a reducer; empty before its first step."""
    shares, pre_scales = reducer.saturated_shares, reducer.pre_scales
    if shares is None:
        return {}
    return {
        "fp8_gradients/mu_min": pre_scales.min(),
        "fp8_gradients/mu_median": pre_scales.median(),
        "fp8_gradients/mu_max": pre_scales.max(),
        "fp8_gradients/saturated_max": shares.max(),
        "fp8_gradients/bytes": float(reducer.bytes_sent),
        "fp8_gradients/bytes_bf16": float(reducer.bytes_of_all_reduce(2)),
        "fp8_gradients/bytes_float32": float(reducer.bytes_of_all_reduce(4)),
    }


def stored_state(optimizer: "torch.optim.Optimizer") -> dict[str, float]:
    """Return the bytes of this rank's state by kind of tensor; empty before the first step.

    `scales` are those of all kinds together. `parameters`: elements that the optimizer updates, on all ranks.
    """
    from fp8scope.observe.memory_account import optimizer_account
    from fp8scope.observe.tensors.base import local

    stored: dict[str, int] = {}
    for key, sizes in optimizer_account([optimizer]).items():
        # The number of steps is no state in few bits.
        if key != "step":
            kind = SCALES if key.endswith("_scale") else key[:32]
            stored[kind] = stored.get(kind, 0) + sum(sizes.values())
    if not stored:
        return {}
    largest = sorted(stored, key=lambda key: (key != SCALES, -stored[key]))[:MAX_KEYS]
    scalars = {f"optimizer_state/{key}_bytes": float(stored[key]) for key in largest}
    elements = sum(local(p).numel() for group in optimizer.param_groups for p in group["params"])
    scalars["optimizer_state/parameters"] = float(elements)
    level = getattr(optimizer, "level", "")
    if level in ("O1", "O2", "O3"):
        scalars["optimizer_state/level"] = float(level[1])
    return scalars
