"""Putting observers into layers that are not ours."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fp8scope.observe.tensors.base import OnError
from fp8scope_kernels import HighPrecisionObserver, Slot
from fp8scope_kernels.recipes import Role


def replace_observer(
    layer: nn.Module, observer: HighPrecisionObserver, slots: Mapping[Role, Slot], on_error: OnError
) -> None:
    """Hook `observer` into the layer, in the place of one that was there."""
    for key, hook in list(layer._forward_hooks.items()):
        if isinstance(hook, HighPrecisionObserver):
            del layer._forward_hooks[key]
    observer.slots.update(slots)
    observer.on_error = on_error
    layer.register_forward_hook(observer)


def shapes_of(layer: Any) -> dict[Role, tuple[int, ...]]:
    """The shapes of a linear layer's tensors, -1 for what is known only at run time."""
    return {
        "input": (-1, layer.in_features),
        "weight": (layer.out_features, layer.in_features),
        "grad_output": (-1, layer.out_features),
    }
