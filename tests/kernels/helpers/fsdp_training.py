"""Training of a small FP8 model under FSDP2, with and without FP8 all-gather, on the ranks of a group."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    Recipe,
    StatisticsBuffer,
    convert,
    gather_weights_in_fp8,
    keep_weights,
    observe,
)

WIDTH, STEPS = 32, 4


class Block(nn.Module):
    """`how` is the kind of activation checkpointing: none, hooks or reentrant."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.how = "none"

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "none" or not torch.is_grad_enabled():
            return x + self.inner(x)
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")
        return x + y


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training.

    `late`: FP8 all-gather begins after a forward pass. `prepare` is called with the converted model before it
    is sharded, `between` after each optimizer step; what it returns is compared, too.
    """

    recipe: Recipe
    hidden: int = 64
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    dtype: torch.dtype = torch.float32
    root_only: bool = False
    reshard_after_forward: bool | int | None = None
    checkpointing: str = "none"
    micro_batches: int = 1
    keep: bool = False
    stay_unsharded: bool = False
    meta: bool = False
    by_columns: bool = False
    late: bool = False
    mesh: Any = None
    prepare: Callable[[nn.Sequential], None] = lambda model: None
    between: Callable[[nn.Sequential], Any] = lambda model: None


def make_model(setup: Setup) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = Block(setup.hidden), Block(setup.hidden)
    model = nn.Sequential(first, second, nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        # A large element in one shard, small ones in the other: scales of parts would differ.
        for layer in (first.up, second.down):
            layer.weight[0, 0] = 8.0
            layer.weight[-1] *= 1e-4
    return model.to(setup.dtype)


def shard(model: Any, setup: Setup) -> None:
    for block in model[:2]:
        block.how = setup.checkpointing
    options: Any = {"mp_policy": setup.policy, "mesh": setup.mesh}
    if setup.by_columns:
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.dim() - 1)
    if setup.reshard_after_forward is not None:
        options["reshard_after_forward"] = setup.reshard_after_forward
    for module in () if setup.root_only else model[:2]:
        fully_shard(module, **options)
    fully_shard(model, **options)


def make(setup: Setup, *, in_fp8: bool) -> tuple[nn.Sequential, StatisticsBuffer]:
    model, rows = make_model(setup), StatisticsBuffer()
    weights = model.state_dict()
    if setup.meta:
        model = model.to("meta")
    convert(model, setup.recipe)
    setup.prepare(model)
    shard(model, setup)
    if in_fp8 and not setup.late:
        gather_weights_in_fp8(model)
    if setup.meta:
        model.to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.copy_(as_sharded(weights[name], parameter))
    observe(model, rows)
    if setup.late:
        with torch.no_grad():
            model(torch.ones(1, WIDTH, dtype=setup.dtype))
        for module in model.modules():
            if isinstance(module, FSDPModule) and not in_fp8:
                module.reshard()
        rows.zero_()
        if in_fp8:
            gather_weights_in_fp8(model)
    return model, rows


def as_sharded(whole: Tensor, parameter: Any) -> Any:
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def batch(rank: int, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return torch.randn(8, WIDTH, generator=generator) * 2.0**step


def train(model: Any, rank: int, setup: Setup, steps: int = STEPS, first: int = 0) -> list[float]:
    """The loss of each micro-batch."""
    # Large steps, so that delayed scales saturate.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        with keep_weights(model) if setup.keep else nullcontext():
            for part in range(setup.micro_batches):
                is_last = part == setup.micro_batches - 1
                if setup.stay_unsharded:
                    model.set_requires_gradient_sync(is_last)
                    model.set_reshard_after_backward(is_last)
                x = batch(rank, step, part).to(setup.dtype).requires_grad_()
                loss = (model(x).float() - x.float().roll(1, 1)).square().mean()
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        losses.append(setup.between(model) or 0.0)
    return losses


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach().clone()


def everything(model: nn.Module, rows: StatisticsBuffer) -> dict[str, Tensor]:
    """Weights, their gradients, scaling state and counters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Evaluation leaves the outermost group unsharded.
            module.reshard()
    return {
        **{name: whole(p) for name, p in model.named_parameters()},
        **{f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        **{name: buffer.clone() for name, buffer in model.named_buffers()},
        "counters": rows.data.clone(),
    }


def differences(rank: int, setup: Setup) -> list[str]:
    """What differs between the two trainings, bit for bit."""
    (plain, expected), (model, rows) = make(setup, in_fp8=False), make(setup, in_fp8=True)
    losses = train(plain, rank, setup), train(model, rank, setup)
    found = [] if losses[0] == losses[1] else [f"losses {losses[1]} for {losses[0]}"]
    return found + different(everything(plain, expected), everything(model, rows))


def different(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    assert expected.keys() == actual.keys()
    return [
        f"{name}: {actual[name].tolist()} for {tensor.tolist()}"[:400]
        for name, tensor in expected.items()
        if not torch.equal(tensor, actual[name])
    ]
