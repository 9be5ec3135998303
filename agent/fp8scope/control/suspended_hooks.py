"""Suspends the agent's hooks on models for passes that must not be recorded."""

import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fp8scope.observe.tensors.switched_hooks import held
from fp8scope_kernels import ExpertProducts, Fp8Linear

OURS = ("fp8scope.", "fp8scope_kernels.")
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@contextmanager
def without_hooks(models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
    """Suspend the agent's hooks on these models and optimizers. Other hooks stay, in their order."""
    tables = [
        table
        for model in models
        for module in model.modules()
        for name in _MODULE_HOOKS
        if (table := getattr(module, name, None))
    ]
    tables += [
        table
        for optimizer in optimizers
        for name in _OPTIMIZER_HOOKS
        if (table := getattr(optimizer, name, None))
    ]
    suspended = [(table, dict(table)) for table in tables if any(_is_ours(hook) for hook in table.values())]
    slots = [
        (layer, layer.slots)
        for model in models
        for layer in model.modules()
        if isinstance(layer, Fp8Linear | ExpertProducts) and layer.slots
    ]
    listeners = _listeners()
    suspended_listeners = list(listeners)
    listeners.clear()
    for table, before in suspended:
        _fill(table, {key: hook for key, hook in before.items() if not _is_ours(hook)})
    for layer, _ in slots:
        layer.slots = {}
    try:
        with held():
            yield
    finally:
        for table, before in suspended:
            # Keep hooks that were added meanwhile.
            _fill(table, {**before, **table})
        for layer, original in slots:
            layer.slots = original
        listeners[:0] = suspended_listeners


def _fill(table: MutableMapping[Any, Any], hooks: dict[Any, Any]) -> None:
    """Replace the table's content in place, because torch and handles refer to the table object."""
    table.clear()
    table.update(hooks)


def _is_ours(hook: Any) -> bool:
    """Return whether a function, bound method or callable object belongs to the agent."""
    owner = getattr(hook, "__self__", None)
    modules = [
        getattr(hook, "__module__", ""),
        type(hook).__module__,
        type(owner).__module__ if owner else "",
    ]
    return any(str(module).startswith(OURS) for module in modules)


def _listeners() -> list[Any]:
    """The listeners for backward passes; see fp8scope.autolog.loss_capture."""
    loss_capture = sys.modules.get("fp8scope.autolog.loss_capture")
    listeners: list[Any] = loss_capture._listeners if loss_capture is not None else []
    return listeners
