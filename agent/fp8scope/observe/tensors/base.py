"""Shared by the sources of tensor statistics: the protocol `TensorSource`, and unwrapping."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8scope_kernels.recipes import Role

_is_tracing: Callable[[], bool] = torch._C._is_tracing

OnError = Callable[[Exception], None]

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class TensorSource(Protocol):
    """Observes one kind of tensors: binds them to rows of the tables and writes these rows during steps.

    A source never waits for a device. In a step in which it writes nothing, it only checks a flag.
    """

    recipe: Mapping[str, Any]
    """The quantisation of the tensors, for the run's page; empty if they are not."""
    tensors: int
    """The number of observed tensors."""
    every_step: bool
    """True if `finish` is called in unsampled steps, too."""

    def finish(self, sampled: bool) -> None:
        """Write what is known only at the end of a step; called before its rows are copied."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of `torch.compile` and data parallelism."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def path_of(path: str) -> str:
    """Return a module's path without the names that wrappers have added."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, and any other tensor unchanged."""
    part = x.to_local() if hasattr(x, "to_local") else x
    assert isinstance(part, torch.Tensor)
    return part


def is_traced() -> bool:
    """Return whether calls are being recorded: for `torch.compile`, `torch.export` or `torch.jit.trace`."""
    return torch.compiler.is_compiling() or _is_tracing()


def inside_backward() -> bool:
    """Return whether this thread is inside a backward pass.

    Activation checkpointing calls modules there again.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def shapes_of(layer: Any) -> dict[Role, tuple[int, ...]]:
    """Return the shapes of a linear layer's tensors, with -1 for dimensions known only at run time."""
    return {
        "input": (-1, layer.in_features),
        "weight": (layer.out_features, layer.in_features),
        "grad_output": (-1, layer.out_features),
    }
