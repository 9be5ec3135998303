"""Hooks of layers that are registered only in the steps that need them.

torch takes a few microseconds to call a hook, even one that returns at once. In a model of thousands of small
layers that would be a tenth of each step.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from fp8scope.observe.tensors.base import OnError
from fp8scope_kernels import HighPrecisionObserver, Slot
from fp8scope_kernels.hooks import HookHandle, register_forward_hook, register_forward_pre_hook, remove_hooks
from fp8scope_kernels.recipes import Role
from fp8scope_kernels.torch_internals import call_before_compiling

Table = Literal["_forward_hooks", "_forward_pre_hooks"]

_owners: "weakref.WeakKeyDictionary[nn.Module, dict[Table, object]]" = weakref.WeakKeyDictionary()
"""The switched hook of each module that was added last. A run that watches a model replaces earlier ones."""
_switches: "weakref.WeakSet[HookSwitch]" = weakref.WeakSet()
_holders: list[object] = []
"""Those for whom all hooks stay as they are; see `held`."""


class HookSwitch:
    """Hooks that are registered and removed together.

    A graph that is compiled while they are removed would never call them. Therefore they return before torch
    compiles anything, and stay if torch cannot announce it. Hooks that a graph has called stay from then on,
    because torch would compile it again without them.

    `in_graphs=False`: hooks that do nothing in graphs are removed before torch compiles, for the same reason.
    """

    def __init__(self, *, in_graphs: bool = True) -> None:
        self.is_on = True
        self._in_graphs = in_graphs
        self._hooks: list[tuple[weakref.ref[nn.Module], Table, HookHandle, Callable[..., Any]]] = []
        self._on_error: OnError | None = None
        self._is_in_graph = False
        _switches.add(self)

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, module: nn.Module, table: Table, hook: Callable[..., Any], on_error: OnError) -> None:
        """Register `hook` with the module, until the next `set`. `on_error` is called if that fails."""
        self._hooks.append((weakref.ref(module), table, _register(module, table, hook), hook))
        self._on_error = on_error
        self.is_on = True

    def set(self, on: bool) -> None:
        """Register the hooks, or remove them if that is safe."""
        if not self._hooks or _holders or (on and self.is_on):
            return
        # Asked for in each step, because `torch._dynamo.reset` forgets whom to call.
        on = on or self._is_in_graph or not call_before_compiling(_before_compiling)
        if not on and self.is_on:
            self._is_in_graph = on = any(getattr(hook, "is_in_graph", False) for *_, hook in self._hooks)
        if on != self.is_on:
            self.is_on = on
            self._hooks = [entry for entry in self._hooks if _switch(*entry, on)]

    def remove(self) -> None:
        """Remove the hooks for good."""
        for _, _, handle, _ in self._hooks:
            handle.remove()
        self._hooks.clear()

    def set_before_compiling(self) -> None:
        """Register or remove the hooks. Never raises: an exception would end the script's compilation."""
        try:
            self.set(self._in_graphs)
        except Exception as error:
            if self._on_error is not None:
                self._on_error(error)


def replace_observer(
    layer: nn.Module,
    observer: HighPrecisionObserver,
    slots: Mapping[Role, Slot],
    on_error: OnError,
    switch: HookSwitch | None = None,
) -> None:
    """Register `observer` as a hook of the layer, in place of an earlier one: for good, or with a switch."""
    remove_hooks(layer._forward_hooks, HighPrecisionObserver)
    observer.slots.update(slots)
    observer.on_error = on_error
    if switch is None:
        _register(layer, "_forward_hooks", observer)
    else:
        switch.add(layer, "_forward_hooks", observer, on_error)


@contextmanager
def held() -> Iterator[None]:
    """Switch no hooks within the block."""
    holder = object()
    _holders.append(holder)
    try:
        yield
    finally:
        _holders.remove(holder)


def _before_compiling(*_: object) -> None:
    for switch in tuple(_switches):
        switch.set_before_compiling()


def _register(module: nn.Module, table: Table, hook: Callable[..., Any]) -> HookHandle:
    register = register_forward_hook if table == "_forward_hooks" else register_forward_pre_hook
    _owners.setdefault(module, {})[table] = hook
    return register(module, hook)


def _switch(
    reference: "weakref.ref[nn.Module]", table: Table, handle: HookHandle, hook: Callable[..., Any], on: bool
) -> bool:
    """Register or remove one hook. Returns False if it is of no more use."""
    module = reference()
    if module is None or _owners.get(module, {}).get(table) is not hook:
        return False
    hooks = getattr(module, table)
    if on:
        hooks.setdefault(handle.id, hook)
    elif next(reversed(hooks), None) == handle.id:
        # A hook that others follow stays, because it would return behind them.
        del hooks[handle.id]
    return True
