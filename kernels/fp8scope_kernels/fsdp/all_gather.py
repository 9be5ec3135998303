"""`gather_weights_in_fp8`: FSDP2 gathers the weights of FP8 layers as FP8 bytes."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from fp8scope_kernels.fsdp.weight_shards import WeightShard, quantize_shards
from fp8scope_kernels.recipes import CurrentScaling, DelayedScaling
from fp8scope_kernels.torch_internals import (
    break_graph,
    current_graph_task_id,
    fsdp_parameters,
    is_fsdp_module,
    settle_fsdp,
)

NAME = "weight_shard"
"""The attribute of a layer whose weight can travel in FP8: a `WeightShard`, or None."""

NOT_SHARDED = "not sharded by fully_shard"
RECIPE = "{} has scales of rows or blocks"
TENSOR_PARALLEL = "sharded by tensor parallelism, too"
OFFLOADED = "offloaded to the CPU"
SMALLER_GROUP = "resharded to fewer ranks after the forward pass"

logger = logging.getLogger(__name__)


def gather_weights_in_fp8(model: nn.Module) -> tuple[str, ...]:
    """Have FSDP2 send the weights of FP8 layers as FP8 bytes: half of the bytes of BF16.

    Call it after `fully_shard`, on the whole model. Returns the paths of the layers whose weights travel in
    FP8; a logging message (INFO) names the others, whose weights travel as before, and says why. Layers with
    one scale per tensor can: `DelayedScaling` and `CurrentScaling`. Calling it again changes nothing.

    A forward pass of the outermost FSDP module quantises the shards of all weights at once, with the scales
    of the whole weights: one all-reduce of their amaxes, and one of their counters. Losses, gradients,
    scales and counters have the same bits as without this. Within `keep_weights` that happens once in the
    block. While a layer's `precision`, or its `products`, need the weight in BF16, it travels as it is.

    The parameters, the optimizer and checkpoints see the weights in high precision. During a forward pass
    `layer.weight` is a tensor with FP8 in its memory: other code that reads it gets q / s.
    """
    taken, left = [], {}
    by_layer = {}
    for fsdp_module, group, parameter in fsdp_parameters(model):
        info = parameter._module_info
        for owner in (info.module, *info.shared_modules):
            by_layer[owner, info.param_name] = fsdp_module, group, parameter
    roots = list(_outermost(model))
    shards: dict[nn.Module, list[WeightShard]] = {root: [] for root in roots}
    for path, layer in model.named_modules():
        if not hasattr(layer, NAME):
            continue
        held = by_layer.get((layer, "weight"))
        reason = NOT_SHARDED if held is None else _reason_to_leave(layer, *held[1:])
        if reason or held is None:
            left[path or "the model"] = reason
            continue
        taken.append(path)
        if getattr(layer, NAME) is not None:
            continue
        shard = WeightShard(layer, held[2], held[0])
        shard.forget()
        setattr(layer, NAME, shard)
        root = next(root for root in roots if any(module is layer for module in root.modules()))
        shards[root].append(shard)
    for root, own in shards.items():
        if own:
            _prepare_in_forward(root, own)
    if left:
        logger.info("%s", _said(left))
    return tuple(taken)


def _reason_to_leave(layer: Any, group: Any, parameter: Any) -> str:
    recipe = layer.recipe
    if not isinstance(recipe, DelayedScaling | CurrentScaling):
        return RECIPE.format(recipe.kind)
    if parameter.is_dtensor:
        return TENSOR_PARALLEL
    if parameter.offload_to_cpu:
        return OFFLOADED
    after = parameter.post_forward_mesh_info
    return SMALLER_GROUP if after is not None and after is not group.mesh_info else ""


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The FSDP modules that no other one contains: their forward passes begin and end an iteration."""
    if is_fsdp_module(model):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _prepare_in_forward(root: nn.Module, shards: list[WeightShard]) -> None:
    """Quantise the shards before FSDP2 gathers the first of them."""
    for shard in shards:
        shard.attach()
    root.register_forward_pre_hook(partial(_begin, root, shards), prepend=True)
    root.register_forward_hook(partial(_end, shards), always_call=True)


@break_graph
def _begin(root: nn.Module, shards: list[WeightShard], *_: Any) -> None:
    if current_graph_task_id() != -1:
        # Activation checkpointing recomputes with the bytes of the forward pass.
        return
    settle_fsdp(root)
    own = [shard for shard in shards if getattr(shard.layer, NAME, None) is shard]
    for shard in own:
        # `to_empty`, `load_state_dict(assign=True)` and others replace the local tensors.
        shard.attach()
        if shard.is_unsharded and shard.sends_fp8 != shard.wants_fp8:
            shard.fsdp_module.reshard()
    stale = [shard for shard in own if shard.wants_fp8 and shard.is_stale()]
    for shard in stale:
        if shard.is_unsharded:
            shard.fsdp_module.reshard()
    quantize_shards(stale)
    for shard in own:
        shard.is_prepared = True


@break_graph
def _end(shards: list[WeightShard], *_: Any) -> None:
    for shard in shards:
        shard.is_prepared = current_graph_task_id() != -1 and shard.is_prepared


def _said(left: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for path, reason in left.items():
        by_reason.setdefault(reason, []).append(path)
    parts = (
        f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''} ({reason})"
        for reason, paths in by_reason.items()
    )
    return f"Not gathered in FP8: {'; '.join(parts)}."
