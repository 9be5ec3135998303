"""Finds the arguments of `scaled_dot_product_attention` that rule out its fused kernels.

torch chooses the kernel (`torch._fused_sdp_choice`) from the arguments and the device; SDPBackend.MATH
writes the matrix of attention to memory. Each argument is changed in turn, and torch is asked again; nothing
is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import attention
from torch.utils._python_dispatch import _disable_current_modes

Call = dict[str, Any]

PARAMETERS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
INPUTS: Final = ("query", "key", "value")


def obstacles(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what rules out the fused kernels for a call with these arguments: keys of `CHANGES`.

    If changing one argument is enough, each that is enough is returned; else a smallest set that has to
    change together. "sdpa_kernel" is returned where the script allows no fused kernel. Empty if the call is
    fused, or if torch does not tell.
    """
    call: Call = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
    if not all(isinstance(call.get(name), Tensor) for name in INPUTS):
        return ()
    try:
        with _disable_current_modes():
            return _obstacles(call)
    except (AttributeError, RuntimeError, TypeError):
        # Another version of torch, a subclass of tensors that it does not know, or no memory for a copy.
        return ()


def _obstacles(call: Call) -> tuple[str, ...]:
    if _is_fused(call):
        return ()
    if set(attention._cur_sdpa_kernel_backends()) <= {attention.SDPBackend.MATH}:
        return ("sdpa_kernel",)
    changed = {name: change(call) for name, change in CHANGES.items()}
    possible = [name for name, new in changed.items() if new is not None]
    if enough := [name for name in possible if _is_fused(_changed(call, [name]))]:
        return tuple(enough)
    needed = possible
    if not _is_fused(_changed(call, needed)):
        return ()
    for name in possible:
        rest = [other for other in needed if other != name]
        needed = rest if _is_fused(_changed(call, rest)) else needed
    return tuple(needed)


def _is_fused(call: Call) -> bool:
    return int(torch._fused_sdp_choice(**call)) != attention.SDPBackend.MATH.value


def _changed(call: Call, names: Sequence[str]) -> Call:
    for name in names:
        call = CHANGES[name](call) or call
    return call


def _without_dropout(call: Call) -> Call | None:
    return {**call, "dropout_p": 0.0} if call.get("dropout_p") else None


def _with_detached_mask(call: Call) -> Call | None:
    mask = call.get("attn_mask")
    is_trained = isinstance(mask, Tensor) and mask.requires_grad
    return {**call, "attn_mask": mask.detach()} if is_trained else None  # type: ignore[union-attr]


def _without_mask(call: Call) -> Call | None:
    mask = call.get("attn_mask")
    # A mask that only has to be detached need not go.
    return {**call, "attn_mask": None} if mask is not None and not mask.requires_grad else None


def _with_four_dimensions(call: Call) -> Call | None:
    if call["query"].dim() >= 4:
        return None
    return {**call, **{name: call[name][(None,) * (4 - call[name].dim())] for name in INPUTS}}


def _with_adjacent_features(call: Call) -> Call | None:
    if all(call[name].stride(-1) == 1 for name in INPUTS):
        return None
    ordered = {name: torch.empty_like(call[name], memory_format=torch.contiguous_format) for name in INPUTS}
    return {**call, **_as_before(call, ordered)}


def _with_equal_features(call: Call) -> Call | None:
    if call["value"].shape[-1] == call["key"].shape[-1]:
        return None
    return {**call, "value": call["key"]}


def _in_16_bits(call: Call) -> Call | None:
    if call["query"].element_size() <= 2:
        return None
    strided = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device=x.device)
        for name, x in ((name, call[name]) for name in INPUTS)
    }
    return {**call, **_as_before(call, strided)}


def _as_before(call: Call, new: Mapping[str, Tensor]) -> Call:
    """New inputs, whose values nobody reads; they need gradients where those of the call do."""
    return {name: x.requires_grad_(call[name].requires_grad) for name, x in new.items()}


CHANGES: Final[Mapping[str, Callable[[Call], Call | None]]] = {
    "dropout_p": _without_dropout,
    "trained_mask": _with_detached_mask,
    "attn_mask": _without_mask,
    "dimensions": _with_four_dimensions,
    "layout": _with_adjacent_features,
    "value_features": _with_equal_features,
    "dtype": _in_16_bits,
}
"""Changes of a call, by what they change; None where there is nothing to change."""
