"""Counts the operations that a backward pass repeats, where activations are checkpointed."""

import weakref
from typing import Any

from torch import nn

from fp8scope.observe.tensors.base import inside_backward, is_traced
from fp8scope.observe.timing.flops import FlopCounter
from fp8scope_kernels.hooks import HookHandle, register_forward_hook, register_forward_pre_hook
from fp8scope_kernels.torch_internals import call_before_compiling

_counting: "weakref.WeakSet[Recomputation]" = weakref.WeakSet()


class Recomputation:
    """Counts one backward pass, from hooks on every module of the model, until `end`.

    The hooks are removed before torch compiles a graph: they do nothing in it, and torch would compile it
    again without them.

    Activation checkpointing calls modules again inside of the backward pass. The outermost of them counts.
    Recomputation that stops early, once it has what is needed, counts up to there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._flops = 0
        self._outermost: nn.Module | None = None
        self._counter: FlopCounter | None = None
        self._handles: list[HookHandle] = []
        for module in model.modules():
            # The model's own hooks are being called.
            if module is not model:
                self._handles.append(register_forward_pre_hook(module, self._before, prepend=True))
                self._handles.append(register_forward_hook(module, self._after, always_call=True))
        _counting.add(self)
        call_before_compiling(_before_compiling)

    def end(self) -> int:
        """Remove the hooks. Returns the operations."""
        self.remove_hooks()
        return self._flops

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._outermost is None and not is_traced() and inside_backward():
            self._outermost, self._counter = module, FlopCounter()
            self._counter.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        counter = self._counter
        if module is self._outermost and counter is not None:
            self._outermost = self._counter = None
            counter.__exit__(None, None, None)
            self._flops += counter.flops


def _before_compiling(*_: object) -> None:
    for recomputation in tuple(_counting):
        recomputation.remove_hooks()
