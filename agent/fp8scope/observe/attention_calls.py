"""Tells listeners of each call of torch's `scaled_dot_product_attention`, before it is computed."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope.observe.tensors.base import is_traced
from fp8scope.process.patches import Patch


class AttentionListener(Protocol):
    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Attention is about to be computed of these arguments. Never raises."""


_listeners: "weakref.WeakSet[AttentionListener]" = weakref.WeakSet()
_patches: list[Patch] = []


def listen(listener: AttentionListener) -> None:
    """Replace the function for as long as somebody listens.

    It is replaced in all steps: a compiled graph would have to be compiled again if it changed between them.
    """
    _listeners.add(listener)
    if not _patches:
        _patches.append(Patch(functional, "scaled_dot_product_attention", _observed))


def join(listener: AttentionListener) -> None:
    """Listen as well, if somebody does: it replaces nothing. `leave` ends it."""
    if _patches:
        _listeners.add(listener)


def leave(listener: AttentionListener) -> None:
    """Listen no longer."""
    _listeners.discard(listener)
    if not _listeners and _patches and _patches[0].restore():
        _patches.clear()


def _observed(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        # A compiled graph has only the call of the original.
        if not is_traced():
            for listener in tuple(_listeners):
                listener.called(args, kwargs)
        return original(*args, **kwargs)

    # torch.jit.script knows built-in functions by their identity.
    register = getattr(torch.jit._builtins, "_register_builtin", None)
    if register is not None:
        register(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
    return scaled_dot_product_attention
