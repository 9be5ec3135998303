"""Ranges in a trace that say which module an operator belongs to, and the bytes that FP8 layers hold.

The hooks exist only while a step is traced. A model that torch compiles gets none: a hook would make torch
compile it again. Its operators belong to no layer.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from fp8scope.observe.memory_account import bytes_of, dtype_of
from fp8scope.observe.tensors.base import inside_backward, is_traced
from fp8scope_kernels.hooks import HookHandle, register_forward_hook, register_forward_pre_hook

FP8_LIBRARIES: Final = ("fp8scope_kernels", "torchao.", "transformer_engine.")
PREFIX: Final = "fp8scope.layer:"
SEPARATOR: Final = "|"
"""Between the path of a module and the name of its class, in the name of a range."""
MAX_MODULES: Final = 20_000
_NODES: Final = 3
"""The largest distance of a layer's product from its output, in nodes of the autograd graph."""


class LayerRanges:
    """Names the modules' calls in the trace of one step, until `remove`.

    `held`: for the path of each FP8 layer the bytes by dtype of what it keeps for the backward pass, and
    under "input" those of its input, which a layer in high precision would keep.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.held: dict[str, dict[str, int]] = {}
        self._open: list[tuple[nn.Module, Any]] = []
        self._handles: list[HookHandle] = []
        for model in models:
            if _is_compiled(model):
                continue
            for path, module in list(model.named_modules())[:MAX_MODULES]:
                if path:
                    self._watch(path, module, type(module).__module__.startswith(FP8_LIBRARIES))

    def _watch(self, path: str, module: nn.Module, is_fp8: bool) -> None:
        name = f"{PREFIX}{path}{SEPARATOR}{type(module).__name__}"

        def before(module: nn.Module, args: Any) -> None:
            if not is_traced():
                entered = record_function(name)
                entered.__enter__()  # type: ignore[no-untyped-call]
                self._open.append((module, entered))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            # An exception of the script, or a module that calls itself, may have left others open.
            while self._open and any(opened is module for opened, _ in self._open):
                opened, entered = self._open.pop()
                entered.__exit__(None, None, None)
                if opened is module:
                    break
            if is_fp8 and isinstance(output, Tensor) and not is_traced():
                self._note_held(path, module, args, output)

        self._handles.append(register_forward_pre_hook(module, before))
        self._handles.append(register_forward_hook(module, after, always_call=True))

    def _note_held(self, path: str, module: nn.Module, args: Any, output: Tensor) -> None:
        # Where hooks pack what is saved (checkpointing, offloading), reading it would compute it again.
        if inside_backward() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return
        saved = _saved_by(output)
        if not saved or not args or not isinstance(args[0], Tensor):
            return
        weights = {_storage_of(parameter) for parameter in module.parameters()}
        held = self.held.setdefault(path, {})
        for tensor in saved:
            if _storage_of(tensor) not in weights:
                name = dtype_of(tensor)
                held[name] = held.get(name, 0) + bytes_of(tensor)
        held["input"] = held.get("input", 0) + args[0].nbytes

    def remove(self) -> None:
        """End the ranges that are still open, and remove the hooks."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _is_compiled(model: nn.Module) -> bool:
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def _storage_of(tensor: Tensor) -> int | None:
    """Return what two tensors on the same memory have in common; None for a subclass that wraps others."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _saved_by(output: Tensor) -> list[Tensor]:
    """Return the tensors that the FP8 product behind a layer's output has saved for its backward pass."""
    node = output.grad_fn
    for _ in range(_NODES):
        if node is None:
            return []
        # Of functions written in Python; torch's own have a name for each saved tensor.
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return [tensor for tensor in node.saved_tensors if isinstance(tensor, Tensor)]
        node = node.next_functions[0][0] if node.next_functions else None
    return []
