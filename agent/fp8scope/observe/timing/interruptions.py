"""Finds what interrupts the phases of a step: the loader, copies, collectives, checkpoints.

Functions of torch are wrapped while a model is watched. A wrapper times a call for the training thread and
for its backward pass only: threads that prefetch or save in the background interrupt nothing. A script that
has imported a function by its name before (`from torch import save`) calls the original, which is not seen.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fp8scope.observe.tensors.base import is_traced
from fp8scope.observe.timing.anatomy import CHECKPOINT, COMMUNICATION, COPY, DATA_PART
from fp8scope.process.patches import Function, Patch

COLLECTIVES: Final = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
CHECKPOINTS: Final = {
    "torch": ("save", "load"),
    "torch.distributed.checkpoint": ("save", "load", "async_save"),
    "safetensors.torch": ("save_file", "load_file", "save_model"),
}
"""Functions that save and load, by their module; wrapped where the script has imported that."""


class Interrupted(Protocol):
    """The clock of a run: `observe.timing.torch_hooks.Stopwatch`."""

    def enter(self) -> bool:
        """An interruption begins. Returns whether it is timed, and `leave` must follow."""

    def leave(self, part: int) -> None:
        """The interruption ends, and was this part of the anatomy."""

    def loaded(self, batches: Any) -> None:
        """A loader has handed over a batch; `batches` is its iterator."""

    def copied(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """A tensor of the host was copied to an accelerator."""


Wrapped = Iterator[tuple[Any, str, Callable[[Function], Function]]]
"""Functions to wrap: their owner, their name, and what makes the wrapper."""

_listeners: "weakref.WeakSet[Interrupted]" = weakref.WeakSet()
_patches: dict[tuple[Any, str], Patch] = {}


def listen(listener: Interrupted) -> None:
    """Time what interrupts the listener's steps, until `stop`. It is not kept alive."""
    _listeners.add(listener)
    _wrap(_loaders())
    _wrap(_checkpoints())


def listen_to_collectives() -> None:
    """Time collectives, too; called when the training has begun and ranks are connected."""
    if are_ranks_connected():
        _wrap(_collectives())


def listen_to_copies() -> None:
    """Time copies, too; called when a model is on an accelerator."""
    _wrap((torch.Tensor, name, _timed_copy) for name in ("to", "cuda"))


def stop(listener: Interrupted) -> None:
    """Time nothing for the listener any more; the last one restores the functions."""
    _listeners.discard(listener)
    if not _listeners:
        for key in reversed(tuple(_patches)):
            # Where another library has wrapped our wrapper, it stays, and only calls the original.
            if _patches[key].restore():
                del _patches[key]


def are_ranks_connected() -> bool:
    """Return whether this process belongs to a group of `torch.distributed`."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _wrap(functions: Wrapped) -> None:
    for owner, name, wrap in functions:
        if (owner, name) not in _patches:
            _patches[owner, name] = Patch(owner, name, wrap)


def _loaders() -> Wrapped:
    # The beginning of an epoch starts worker processes.
    yield DataLoader, "__iter__", functools.partial(_timed, DATA_PART)
    yield _BaseDataLoaderIter, "__next__", _timed_batch


def _checkpoints() -> Wrapped:
    for module, functions in CHECKPOINTS.items():
        for name in functions:
            if hasattr(sys.modules.get(module), name):
                yield sys.modules[module], name, functools.partial(_timed, CHECKPOINT)


def _collectives() -> Wrapped:
    from torch.distributed import Work, distributed_c10d

    # torch's compiler knows collectives by their identity; its table must have the originals.
    import torch.distributed._functional_collectives  # noqa: F401  # isort: skip

    for name in COLLECTIVES:
        for module in (distributed_c10d, torch.distributed):
            if hasattr(module, name):
                yield module, name, functools.partial(_timed, COMMUNICATION)
    # The waits for collectives that were begun with `async_op=True`.
    yield Work, "wait", functools.partial(_timed, COMMUNICATION)


def _timed(part: int, original: Function) -> Function:
    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        # A compiled graph has only the call of the original.
        if is_traced():
            return original(*args, **kwargs)
        entered = [listener for listener in _listeners if listener.enter()]
        try:
            return original(*args, **kwargs)
        finally:
            for listener in entered:
                listener.leave(part)

    return timed


def _timed_batch(original: Function) -> Function:
    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        if is_traced():
            return original(self)
        entered = [listener for listener in _listeners if listener.enter()]
        try:
            batch = original(self)
        finally:
            for listener in entered:
                listener.leave(DATA_PART)
        # Not at the end of the data, nor after an exception.
        for listener in entered:
            listener.loaded(self)
        return batch

    return __next__


def _timed_copy(original: Function) -> Function:
    @functools.wraps(original)
    def timed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or not self.is_cpu or not (args or kwargs):
            return original(self, *args, **kwargs)
        entered = [
            listener for listener in _listeners if _goes_to_a_device(args, kwargs) and listener.enter()
        ]
        try:
            copy = original(self, *args, **kwargs)
        finally:
            for listener in entered:
                listener.leave(COPY)
        for listener in entered:
            listener.copied(self, copy)
        return copy

    return timed


def _goes_to_a_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of `Tensor.to` or `Tensor.cuda` name an accelerator."""
    target = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, torch.device):
        return target.type not in ("cpu", "meta")
    if isinstance(target, str):
        return not target.startswith(("cpu", "meta"))
    return isinstance(target, int)
