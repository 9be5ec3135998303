"""Scaling state in a process group: equal scales on all ranks, and exclusion from DDP's broadcasts.

Each rank sees different data, so that delayed scaling has different amax histories on each. `sync_amaxes`
replaces them by their maximum over the ranks, call by call, in one all-reduce for all tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8scope_kernels.hooks import register_module_registration_hook_of_all
from fp8scope_kernels.recipes import DelayedScaling
from fp8scope_kernels.scaling_state import ScalingState

Group = Any
"""A `torch.distributed.ProcessGroup`; None is the default one."""

NO_SCALE = -(2**62)
"""In place of the scale of a state that was never called, below every negated scale."""


def sync_amaxes(model: nn.Module, group: Group | None = None) -> int:
    """Make the delayed scales of all ranks equal; returns how many tensors took part.

    Applies to states whose recipe has `reduce_amax`. The history becomes the maximum over the ranks, entry by
    entry, and the scale the minimum, in a single all-reduce of `sum(history_length + 1)` int64 numbers.
    Entries correspond by the number of their call; a rank that had only zeros, or no tokens for an expert,
    takes the newer entries of the others and their number of calls. Call it once per optimizer step on every
    rank. A tensor's first call takes its scale from the rank's own data; after the first synchronisation all
    ranks agree.

    Does nothing without a process group of at least two ranks. Does not wait on a GPU.
    """
    states = [
        state
        for module in model.modules()
        if isinstance(module, ScalingState) and _reduces(module)
        for state in module.states()
    ]
    if not states or not _has_peers(group):
        return 0
    # One stack for each length, so that the number of launches does not grow with the model.
    stacks: dict[int, list[ScalingState]] = {}
    for state in states:
        stacks.setdefault(state.amax_history.numel(), []).append(state)
    with torch.no_grad():
        parts = [part.flatten() for stack in stacks.values() for part in (_numbered(stack), _negated(stack))]
        flat = torch.cat(parts)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
        pieces = iter(torch.split(flat, [part.numel() for part in parts]))
        for stack in stacks.values():
            _take(stack, next(pieces), next(pieces))
    return len(states)


def sync_amaxes_after(optimizer: Optimizer, model: nn.Module, group: Group | None = None) -> RemovableHandle:
    """Call `sync_amaxes(model, group)` after every `optimizer.step()`, until `.remove()` of the handle."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        sync_amaxes(model, group)

    return optimizer.register_step_post_hook(hook)


def keep_scaling_out_of_ddp(model: nn.Module) -> int:
    """Exclude scaling state from DistributedDataParallel; returns the number of buffers excluded.

    DDP excludes it by itself when it wraps a model. Otherwise it would overwrite the buffers of every rank
    with those of rank 0 at each forward call, and a large amax that only another rank has seen would be lost.
    This function is for wrappers of other libraries that read DDP's list of what to ignore from the model.
    """
    names = _scaling_buffers(model)
    already_ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ignored: Any = sorted(already_ignored | set(names))
    model._ddp_params_and_buffers_to_ignore = ignored
    return len(names)


def _scaling_buffers(model: nn.Module) -> list[str]:
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, ScalingState)
        for name, _ in module.named_buffers(recurse=False)
    ]


def _leave_scaling_to_ranks(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Exclude scaling state from DDP when it wraps a model: a hook on the registration of modules."""
    if name == "module" and submodule is not None and isinstance(module, DistributedDataParallel):
        module.parameters_to_ignore |= set(_scaling_buffers(submodule))


register_module_registration_hook_of_all(_leave_scaling_to_ranks)


def _reduces(state: ScalingState) -> bool:
    return isinstance(state.recipe, DelayedScaling) and state.recipe.reduce_amax


def _has_peers(group: Group | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _numbered(states: Sequence[ScalingState]) -> Tensor:
    """The histories, int64 [states, history_length], as numbers: the newest call, then the largest amax wins.

    The upper half is the number of the entry's call, the lower half the bits of its amax: of floats that are
    not negative, the order is that of their bits. An entry's place follows from its call, so that ranks with
    other numbers of calls compare the same calls.
    """
    histories = torch.stack([state.amax_history.float() for state in states])
    calls = _calls_of(torch.stack([state.calls for state in states]), histories.shape[1])
    bits = histories.view(torch.int32).long()
    numbered = torch.where(calls > 0, (calls << 32) | bits, 0)
    return torch.zeros_like(numbered).scatter_(1, calls % histories.shape[1], numbered)


def _negated(states: Sequence[ScalingState]) -> Tensor:
    """Numbers, int64 [states], whose maximum belongs to the smallest scale.

    A state never called has scale 0, and is ignored.
    """
    scales = torch.stack([state.scale.float() for state in states])
    return torch.where(scales > 0, -scales.view(torch.int32).long(), NO_SCALE)


def _take(states: Sequence[ScalingState], numbered: Tensor, negated: Tensor) -> None:
    """Write the histories, numbers of calls and scales that the ranks have together."""
    numbered = numbered.view(len(states), -1)
    length = numbered.shape[1]
    counts = (numbered >> 32).amax(1)
    histories = _from_bits(numbered.gather(1, _calls_of(counts, length) % length) & 0xFFFFFFFF)
    scales = torch.where(negated == NO_SCALE, 0.0, _from_bits(-negated))
    torch._foreach_copy_([state.amax_history for state in states], list(histories))
    torch._foreach_copy_([state.calls for state in states], list(counts))
    torch._foreach_copy_([state.scale for state in states], list(scales))
    for state in states:
        state.reduced = True


def _calls_of(counts: Tensor, length: int) -> Tensor:
    """The number of each entry's call, newest first, counted from 1; 0 or less for entries without one."""
    return counts[:, None] - torch.arange(length, device=counts.device)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)
