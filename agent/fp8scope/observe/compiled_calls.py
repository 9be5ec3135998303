"""Hooks around the calls of a module that is compiled in place, by `nn.Module.compile`.

Its own hooks are traced into the graph, where ours do nothing. These are called outside of it.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from fp8scope.observe.tensors.base import is_traced

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


class CompiledCall:
    """Replaces what torch has compiled of a module: calls that between the hooks."""

    def __init__(self, module: nn.Module, before: Before, after: After | None) -> None:
        self.compiled: Any = module._compiled_call_impl
        """What torch has compiled, or another `CompiledCall` around it."""
        self._module: nn.Module | None = module
        self._before: Before | None = before
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, after, module = self._before, self._after, self._module
        if is_traced() or before is None or module is None:
            return self.compiled(*args, **kwargs)
        before(module, args, kwargs)
        output = None
        try:
            output = self.compiled(*args, **kwargs)
        finally:
            if after is not None:
                after(module, args, kwargs, output)
        return output

    def remove(self) -> None:
        """Call the hooks no more."""
        module, self._module, self._before, self._after = self._module, None, None, None
        # Another one may stand around this one.
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self.compiled


class Handle:
    """Removes hooks, without keeping the module alive."""

    def __init__(self, call: CompiledCall) -> None:
        self._call = weakref.ref(call)

    def remove(self) -> None:
        call = self._call()
        if call is not None:
            call.remove()


def around_compiled_calls(module: nn.Module, before: Before, after: After | None = None) -> list[Handle]:
    """Call `before(module, args, kwargs)` and `after(module, args, kwargs, output)` around each call.

    The output is None if the call raised. Returns no handle if the module is not compiled in place.
    """
    if module._compiled_call_impl is None:
        return []
    call = CompiledCall(module, before, after)
    # Copies and pickles of a module leave this attribute out.
    module._compiled_call_impl = call
    return [Handle(call)]
