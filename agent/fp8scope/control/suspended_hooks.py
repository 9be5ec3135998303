"""Passes of a model that nobody is to see: what the agent has hooked into it is taken off, and put back."""

import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fp8scope_kernels import Fp8Linear

OURS = ("fp8scope.", "fp8scope_kernels.")
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@contextmanager
def without_hooks(models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
    """Within it these models and optimizers tell the agent nothing. Hooks of others stay, in their order."""
    tables = [
        table
        for model in models
        for module in model.modules()
        for name in _MODULE_HOOKS
        if (table := getattr(module, name, None))
    ]
    tables += [
        table for one in optimizers for name in _OPTIMIZER_HOOKS if (table := getattr(one, name, None))
    ]
    kept = [(table, dict(table)) for table in tables if any(_is_ours(hook) for hook in table.values())]
    slots = [
        (layer, layer.slots)
        for model in models
        for layer in model.modules()
        if isinstance(layer, Fp8Linear) and layer.slots
    ]
    listeners = _listeners()
    told = list(listeners)
    listeners.clear()
    for table, before in kept:
        _fill(table, {key: hook for key, hook in before.items() if not _is_ours(hook)})
    for layer, _ in slots:
        layer.slots = {}
    try:
        yield
    finally:
        for table, before in kept:
            # With what was added meanwhile.
            _fill(table, {**before, **table})
        for layer, own in slots:
            layer.slots = own
        listeners[:0] = told


def _fill(table: MutableMapping[Any, Any], hooks: dict[Any, Any]) -> None:
    """In place: whoever has the table keeps it."""
    table.clear()
    table.update(hooks)


def _is_ours(hook: Any) -> bool:
    """Whether a function, a bound method or a callable object is the agent's."""
    owner = getattr(hook, "__self__", None)
    places = [getattr(hook, "__module__", ""), type(hook).__module__, type(owner).__module__ if owner else ""]
    return any(str(place).startswith(OURS) for place in places)


def _listeners() -> list[Any]:
    """Who is told of backward passes: see fp8scope.autolog.loss_capture."""
    losses = sys.modules.get("fp8scope.autolog.loss_capture")
    found: list[Any] = losses._listeners if losses is not None else []
    return found
