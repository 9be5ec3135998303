"""What every source has in common: see `Source`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

OnError = Callable[[Exception], None]

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Source(Protocol):
    """A kind of tensors that is observed: it has bound them to rows of the boards, and writes these.

    What it does in a step may wait neither for a device nor for anything else, and costs more than a look at
    a flag only where it has something to write.
    """

    recipe: Mapping[str, Any]
    """How the tensors are quantised, for the run's page; empty where they are not."""
    tensors: int
    """How many it observes."""
    every_step: bool
    """Whether `finish` is to be called in steps that are not sampled as well."""

    def finish(self, sampled: bool) -> None:
        """The step is over and its rows are about to be copied: write what only now can be told."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s and data parallelism's wrappers, whose names are the user's own."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def path_of(path: str) -> str:
    """A module's path without the names that wrappers have put into it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is. Parts add up over the ranks."""
    part = x.to_local() if hasattr(x, "to_local") else x
    assert isinstance(part, torch.Tensor)
    return part
