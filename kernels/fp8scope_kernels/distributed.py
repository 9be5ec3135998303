"""Scaling state in a process group: equal scales on all ranks, and exclusion from DDP's broadcasts.

Each rank sees different data, so that delayed scaling has different amax histories on each. `sync_amaxes`
replaces them by their maximum over the ranks, entry by entry, in one all-reduce for all tensors.
"""

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


def sync_amaxes(model: nn.Module, group: Group | None = None) -> int:
    """Make the delayed scales of all ranks equal; returns how many tensors took part.

    Applies to states whose recipe has `reduce_amax`. The history becomes the maximum over the ranks, entry by
    entry, and the scale the minimum, in a single all-reduce of `sum(history_length + 1)` float32 numbers.
    Call it once per optimizer step on every rank, with the same number of layer calls in between, so that
    entries correspond. A tensor's first call takes its scale from the rank's own data; after the first
    synchronisation all ranks agree.

    Does nothing without a process group of at least two ranks. Does not wait on a GPU.
    """
    states = [module for module in model.modules() if isinstance(module, ScalingState) and _reduces(module)]
    if not states or not _has_peers(group):
        return 0
    with torch.no_grad():
        # The minimum of scales, as a maximum of their negatives. A state never called has scale 0: ignore it.
        parts = [part for state in states for part in (state.amax_history, _negated(state.scale))]
        flat = torch.cat(parts)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
        pieces = iter(torch.split(flat, [part.numel() for part in parts]))
        for state in states:
            state.amax_history.copy_(next(pieces))
            scale = next(pieces)[0]
            state.scale.copy_(torch.where(scale > -torch.inf, -scale, 0.0))
            state.reduced = True
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


def _negated(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, -scale, -torch.inf).reshape(1)
