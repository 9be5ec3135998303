"""Delayed scales under activation checkpointing: a recomputation takes the scales of its own forward call.

A delayed scale belongs to a call. Where several forward calls precede a backward one, as in pipelines, the
state has moved on by the time that a call is recomputed. So the scales of each call are stored with the
region that torch recomputes, and have its lifetime.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8scope_kernels.recipes import DelayedScaling, Recipe, Role
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.torch_internals import (
    checkpointed_regions,
    current_graph_task_id,
    has_saved_tensors_hooks,
)

FORWARD_ROLES: tuple[Role, ...] = ("input", "weight")
NAME = "fp8scope_scales"
"""The attribute of a region that has the scales of its calls, by the state of the layer's input."""

_NOTHING = nullcontext()


class ScaledLayer(Protocol):
    """The parts of an FP8 layer that decide its scales."""

    recipe: Recipe

    @property
    def training(self) -> bool: ...

    def state_of(self, role: Role) -> ScalingState: ...


@dataclass
class _Calls:
    """The scales of a layer's calls in a region, in their order.

    `recomputed`: the number of calls that the backward pass `task` has recomputed.
    """

    scales: list[tuple[Tensor, ...]] = field(default_factory=list)
    task: int = -1
    recomputed: int = 0


def scales_of_call(layer: ScaledLayer) -> AbstractContextManager[None]:
    """Within the block, which is one forward call of the layer, a recomputation has the scales of its call.

    Supports `torch.utils.checkpoint` with and without `use_reentrant`, nested too. With anything else that
    recomputes, the scales are those of the last call.
    """
    if not layer.training or not isinstance(layer.recipe, DelayedScaling):
        return _NOTHING
    # A region saves tensors by hooks, or computes without gradients (`use_reentrant`).
    is_first = current_graph_task_id() == -1
    if is_first and torch.is_grad_enabled() and not has_saved_tensors_hooks():
        return _NOTHING
    regions, source = checkpointed_regions()
    if not regions and source is None:
        return _NOTHING
    return _own_scales([layer.state_of(role) for role in FORWARD_ROLES], regions, source)


@contextmanager
def _own_scales(states: Sequence[ScalingState], regions: Sequence[Any], source: Any) -> Iterator[None]:
    scales = None if source is None else _recalled(source, states[0])
    later = tuple(state.scale.clone() for state in states)
    try:
        if scales is not None:
            _set_scales(states, scales)
        yield
        for region in regions:
            _calls(region, states[0]).scales.append(tuple(state.scale.clone() for state in states))
    finally:
        # torch ends a recomputation by an exception as soon as it has what it needs.
        if scales is not None:
            _set_scales(states, later)


def _recalled(source: Any, state: ScalingState) -> tuple[Tensor, ...] | None:
    """The scales of the call that is being recomputed; None if the region has not seen it."""
    calls, task = _calls(source, state), current_graph_task_id()
    if calls.task != task:
        calls.task, calls.recomputed = task, 0
    index = calls.recomputed
    calls.recomputed += 1
    return calls.scales[index] if index < len(calls.scales) else None


def _calls(region: Any, state: ScalingState) -> _Calls:
    by_state: dict[ScalingState, _Calls] | None = getattr(region, NAME, None)
    if by_state is None:
        by_state = {}
        setattr(region, NAME, by_state)
    return by_state.setdefault(state, _Calls())


@torch.no_grad()
def _set_scales(states: Sequence[ScalingState], scales: Sequence[Tensor]) -> None:
    for state, scale in zip(states, scales, strict=True):
        state.scale.copy_(scale)
