"""Quantised weights that several calls of a layer share: the micro-batches of one step, or an evaluation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8scope_kernels import devices
from fp8scope_kernels.matmul import Operand
from fp8scope_kernels.plain_tensors import is_abstract
from fp8scope_kernels.torch_internals import has_functorch_transforms

NAME = "kept_weight"
"""The attribute of a layer whose quantised weight can be kept: a `KeptWeight`, or None."""

Operands = tuple[Operand, Operand]


class _State(NamedTuple):
    """The signs of a changed weight. Views and shards share the version of their tensor."""

    version: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class KeptWeight:
    """The operands of a layer's weight, from the first call that quantised it."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Have the next call quantise the weight."""
        self._state: _State | None = None
        self._operands: Operands | None = None
        self.shard: Any = None
        """What was quantised of a weight that FSDP2 gathers in FP8."""
        self._is_turned = self._is_counted = False
        self._parts: dict[int, KeptWeight] = {}

    def part(self, index: int) -> "KeptWeight":
        """The operands of one expert's weight, which is a part of a tensor of weights."""
        return self._parts.setdefault(index, KeptWeight())

    def operands(
        self, weight: Tensor, make: Callable[..., Operands], *, update: bool, transpose: bool
    ) -> Operands:
        """The result of `make(update=..., transpose=...)`, the layer's quantiser, or that of an earlier call.

        A weight is counted, and advances its scaling state, by its first call with `update`.
        """
        state = _state_of(weight)
        if state is None:
            return make(update=update, transpose=transpose)
        if state != self._state:
            self.drop()
        lacks = (transpose and not self._is_turned) or (update and not self._is_counted)
        if self._operands is None or lacks:
            self._operands = make(update=update and not self._is_counted, transpose=transpose)
            self._state, self._is_turned = state, transpose
            self._is_counted = self._is_counted or update
        return self._operands


def _state_of(weight: Tensor) -> _State | None:
    """None for weights that are always quantised.

    They have no numbers, belong to a transform of torch.func, or tell no version (inference tensors); or the
    call is captured into a graph, which is replayed with other weights.
    """
    if is_abstract(weight) or has_functorch_transforms() or weight.is_inference():
        return None
    if devices.is_capturing(weight.device):
        return None
    return _State(weight._version, weight.shape, weight.dtype, weight.device)


@contextmanager
def keep_weights(model: nn.Module) -> Iterator[None]:
    """Within the block, FP8 layers and experts of `model` quantise a weight once, and later calls reuse it.

    Put it around code that does not change weights: the micro-batches of one step, before
    `optimizer.step()`, or an evaluation. Results have the same bits, except with `DelayedScaling`: its weight
    advances its state once in the block instead of once per call, and all calls have one scale. Statistics
    count the weight once.

    The block has the quantised weights of all layers in memory, in both directions; under FSDP2 those of the
    whole model. A change of a weight by a torch optimizer, or one that its version shows (any in-place
    operation), has it quantised again. A change through `weight.data` is not seen.
    """
    # Inside another block a layer goes on with what that has.
    layers: list[Any] = [module for module in model.modules() if getattr(module, NAME, module) is None]
    for layer in layers:
        setattr(layer, NAME, KeptWeight())
    # The version of a weight stays while FSDP2 gathers other numbers into it.
    hook = register_optimizer_step_post_hook(partial(_drop_all, layers))
    try:
        yield
    finally:
        hook.remove()
        for layer in layers:
            # `revert` may have removed it.
            vars(layer).pop(NAME, None)


def _drop_all(layers: list[Any], *_: Any) -> None:
    for layer in layers:
        weight: KeptWeight | None = getattr(layer, NAME, None)
        if weight is not None:
            weight.drop()
