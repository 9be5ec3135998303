"""Hooks of our own on modules, optimizers and tensors. They leave no trace in what a script saves.

* Copies and pickles leave them out, whoever makes them: `pickle`, `torch.save`, `copy`, `multiprocessing`,
  `torch.package`. All of these look up how to reduce an OrderedDict, the type of torch's tables of hooks, in
  `copyreg`. The table itself stays the object that handles of the script refer to.
* Their keys are negative. torch numbers the hooks of a script (`RemovableHandle.next_id`) and pickles these
  numbers, so ours must not use them up.
* `torch.jit.script`, which compiles hooks, does not see them.
* Optimizers iterate over their tables of hooks while they call them, and a change in between ends the
  training. So hooks that are removed in the course of a step stay in the table until later, and do nothing.
"""

import copyreg
import functools
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_module_registration_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

Hook = Callable[..., Any]
Table = OrderedDict[int, Any]

MODULE_TABLES: Final = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

_new_keys: Final = itertools.count(-(2**62), -1)
_keys: Final[set[int]] = set()
"""The keys of all hooks of ours that may be in a table."""
_earlier: Callable[[Any], Any] | None = None
"""The reducer of OrderedDict that stood in `copyreg` before ours."""


_STEP: Final = frozenset(
    constant for constant in Optimizer.profile_hook_step.__code__.co_consts if isinstance(constant, CodeType)
)
"""The code of the function that torch puts around the `step` of each optimizer: it calls the hooks."""

_removed: Final[list[tuple["weakref.ref[Table]", int]]] = []
"""Hooks that were removed in the course of a step, and are still in a table."""


class HookHandle:
    """Removes a hook, without keeping its module or optimizer alive. `id` is the hook's key in the table.

    `of_steps`: whether an optimizer calls the hook in its step.
    """

    def __init__(self, *tables: Table, of_steps: bool = False) -> None:
        _install()
        self.id = next(_new_keys)
        self._tables = [weakref.ref(table) for table in tables]
        self._of_steps = of_steps
        _keys.add(self.id)

    def remove(self) -> None:
        """Remove the hook. Removing it twice has no effect."""
        if self._of_steps and _is_in_a_step():
            for reference in self._tables:
                if (table := reference()) is not None and self.id in table:
                    _disarm(table, self.id)
            return
        for reference in self._tables:
            if (table := reference()) is not None:
                table.pop(self.id, None)
        _keys.discard(self.id)


def register_forward_pre_hook(
    module: nn.Module, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False
) -> HookHandle:
    """Do as `module.register_forward_pre_hook`."""
    tables: list[Any] = [module._forward_pre_hooks]
    if with_kwargs:
        tables.append(module._forward_pre_hooks_with_kwargs)
    return _register(hook, tables, prepend)


def register_forward_hook(
    module: nn.Module, hook: Hook, *, with_kwargs: bool = False, always_call: bool = False
) -> HookHandle:
    """Do as `module.register_forward_hook`."""
    tables: list[Any] = [module._forward_hooks]
    if with_kwargs:
        tables.append(module._forward_hooks_with_kwargs)
    if always_call:
        tables.append(module._forward_hooks_always_called)
    return _register(hook, tables)


def register_step_pre_hook(optimizer: Optimizer, hook: Hook) -> HookHandle:
    """Do as `optimizer.register_step_pre_hook`. Not to be called by a hook before a step."""
    return _register_for_steps(hook, optimizer._optimizer_step_pre_hooks)


def register_step_post_hook(optimizer: Optimizer, hook: Hook) -> HookHandle:
    """Do as `optimizer.register_step_post_hook`. Not to be called by a hook after a step."""
    return _register_for_steps(hook, optimizer._optimizer_step_post_hooks)


def register_step_pre_hook_of_all(hook: Hook) -> HookHandle:
    """Do as `torch.optim.optimizer.register_optimizer_step_pre_hook`.

    It is called before the hooks of each optimizer, and may register those.
    """
    return _register_for_steps(hook, _global_optimizer_pre_hooks)


def register_tensor_hook(tensor: Tensor, hook: Hook) -> None:
    """Do as `tensor.register_hook`, for as long as the tensor lives.

    Decorate the hook with `torch.utils.hooks.unserializable_hook`, else torch warns when the tensor is saved.
    """
    if type(tensor) is not Tensor:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    # What `register_hook` does, but for the number.
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    tensor._backward_hooks[next(_new_keys)] = hook


def register_module_registration_hook_of_all(hook: Hook) -> HookHandle:
    """Do as torch's `register_module_module_registration_hook`: for every module that gets a child."""
    return _register(hook, [_global_module_registration_hooks])


def remove_hooks(table: Any, kind: type, marks: Any = None) -> None:
    """Remove the hooks of this type from a table of hooks, and their keys from `marks` of hooks."""
    is_in_a_step = _is_in_a_step()
    for key, hook in list(table.items()):
        if isinstance(hook, kind) and is_in_a_step:
            _disarm(table, key)
        elif isinstance(hook, kind):
            del table[key]
            _keys.discard(key)
            if marks is not None:
                marks.pop(key, None)


@contextmanager
def hidden(module: nn.Module) -> Iterator[None]:
    """Take our hooks out of a module and its parts within the block. Other hooks stay, in their order."""
    taken = HiddenHooks(table for part in module.modules() for table in tables_of(part))
    try:
        yield
    finally:
        taken.restore()


def tables_of(module: nn.Module) -> Iterator[Table]:
    """Yield the tables of the module's hooks."""
    for name in MODULE_TABLES:
        table = module.__dict__.get(name)
        if table is not None:
            yield table


class HiddenHooks:
    """Takes our hooks out of these tables. Other hooks stay, in their order; keeps none of them alive.

    Never make or restore it inside a hook of an optimizer: torch iterates over that table meanwhile.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self._taken: list[tuple[weakref.ref[Table], list[int], dict[int, Any]]] = []
        for table in tables:
            ours = {key: table[key] for key in table if key in _keys}
            if ours:
                self._taken.append((weakref.ref(table), list(table), ours))
                for key in ours:
                    del table[key]

    def restore(self) -> None:
        """Restore the earlier content and order, but for what was added or removed since."""
        taken, self._taken = self._taken, []
        for reference, order, ours in taken:
            if (table := reference()) is not None:
                now = dict(table)
                before = {**now, **{key: hook for key, hook in ours.items() if key in _keys}}
                table.clear()
                table.update({key: before[key] for key in order if key in before})
                table.update(now)


def _register_for_steps(hook: Hook, table: Any) -> HookHandle:
    if _removed and not _is_in_a_step():
        for reference, key in _removed:
            if (other := reference()) is not None:
                other.pop(key, None)
            _keys.discard(key)
        _removed.clear()
    return _register(hook, [table], of_steps=True)


def _disarm(table: Table, key: int) -> None:
    """Let a hook do nothing, without changing its table in a way that ends an iteration."""
    table[key] = _do_nothing
    _removed.append((weakref.ref(table), key))


def _do_nothing(*args: Any) -> None:
    """Stands in a table of hooks for one that was removed."""


def _is_in_a_step() -> bool:
    """Return whether an optimizer is stepping in this thread, so that it may be iterating over its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _STEP:
            return True
        frame = frame.f_back
    return False


def _register(hook: Hook, tables: Any, prepend: bool = False, of_steps: bool = False) -> HookHandle:
    handle = HookHandle(*tables, of_steps=of_steps)
    first, *flags = tables
    first[handle.id] = hook
    for table in flags:
        table[handle.id] = True
    if prepend:
        first.move_to_end(handle.id, last=False)
    return handle


def _install() -> None:
    """Have pickles and copies of OrderedDicts, and `torch.jit`, leave out our hooks from now on."""
    global _earlier
    make: Any = getattr(torch.jit._recursive, "create_script_module", None)
    if make is not None and not hasattr(make, "hides_hooks"):
        torch.jit._recursive.create_script_module = _without_hooks(make)
    reducer: Any = copyreg.dispatch_table.get(OrderedDict)
    if reducer is not _reduce:
        _earlier = reducer
        copyreg.pickle(OrderedDict, _reduce)


def _without_hooks(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes the script module of a module, so that it finds no hooks of ours."""

    @functools.wraps(make)
    def create_script_module(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with hidden(nn_module):
            return make(nn_module, *args, **kwargs)

    create_script_module.hides_hooks = True  # type: ignore[attr-defined]
    return create_script_module


def _reduce(table: "OrderedDict[Any, Any]") -> Any:
    """Reduce an OrderedDict as Python does, but for our hooks."""
    plain = table
    if not _keys.isdisjoint(table):
        plain = OrderedDict((key, value) for key, value in table.items() if key not in _keys)
        vars(plain).update(vars(table))
    return plain.__reduce__() if _earlier is None else _earlier(plain)
