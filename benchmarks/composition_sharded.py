"""Part of compositions.py: sharded FP8 layers in graphs, and with FP8 all-gather, against eager code.

Both trainings run on the same ranks, so that everything must be equal bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from composition_graphs import WIDTH, Mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import Recipe, StatisticsBuffer, convert, gather_weights_in_fp8, keep_weights, observe

STEPS = 3
Run = Callable[[Tensor], Tensor]
PLANS: dict[str, dict[str, Any]] = {
    "column and row": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0)),
    },
}  # fmt: skip
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make(recipe: Recipe) -> tuple[nn.Sequential, StatisticsBuffer]:
    torch.manual_seed(0)
    model, rows = nn.Sequential(Mlp(), Mlp()), StatisticsBuffer()
    convert(model, recipe)
    observe(model, rows)
    return model, rows


@dataclass(frozen=True)
class Data:
    """The data of a rank: part `index` of `parts` of a batch with this seed."""

    seed: int = 0
    index: int = 0
    parts: int = 1

    def batch(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        return torch.randn(256, WIDTH, generator=generator).chunk(self.parts)[self.index].contiguous()


def train(run: Run, model: nn.Module, data: Data, micro_batches: int = 1) -> Tensor:
    """The losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            x = data.batch(10 * step + micro).requires_grad_()
            loss = run(x).float().square().mean()
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses)


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach()


def compared(
    models: list[tuple[nn.Sequential, StatisticsBuffer]], runs: list[Run], data: Data, micro_batches: int = 1
) -> list[str]:
    """The tensors that differ after the training of both models."""
    results = []
    for (model, rows), run in zip(models, runs, strict=True):
        losses = train(run, model, data, micro_batches)
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        tensors = {**model.state_dict(), **gradients, "losses": losses, "counters": rows.data}
        results.append({name: whole(tensor) for name, tensor in tensors.items()})
    return [f"{name} differs" for name in results[0] if not torch.equal(results[0][name], results[1][name])]


def tensor_parallel_graph(recipe: Recipe, rank: int, size: int, plan: str) -> list[str]:
    mesh = init_device_mesh("cpu", (size,))
    models = [make(recipe) for _ in range(2)]
    for model, _ in models:
        for block in model:
            parallelize_module(block, mesh, PLANS[plan])
    # Without sequence parallelism all ranks have the whole batch.
    data = Data(index=rank, parts=size) if plan == "sequence" else Data()
    compiled: Run = torch.compile(models[1][0], backend="aot_eager", fullgraph=True)
    return compared(models, [models[0][0], compiled], data)


def fsdp_graph(recipe: Recipe, rank: int, size: int, how: str) -> list[str]:
    models = [make(recipe) for _ in range(2)]
    for model, _ in models:
        for module in (*model, model):
            fully_shard(module)
    for block in models[1][0]:
        block.compile(backend="aot_eager", fullgraph=True)
    return compared(models, [model for model, _ in models], Data(rank))


def gathered(recipe: Recipe, rank: int, size: int, how: str) -> list[str]:
    shape, names = ((2, size // 2), ("copy", "shard")) if how == "HSDP" else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    models = [make(recipe) for _ in range(2)]
    for model, _ in models:
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=MIXED)
    gather_weights_in_fp8(models[1][0])
    if how == "checkpointing":
        runs = [lambda x, model=model: checkpoint(model, x, use_reentrant=False) for model, _ in models]
        return compared(models, runs, Data(rank))  # type: ignore[arg-type]
    if how != "micro-batches":
        return compared(models, [model for model, _ in models], Data(rank))
    with keep_weights(models[0][0]), keep_weights(models[1][0]):
        return compared(models, [model for model, _ in models], Data(rank), 4)


SHARDED: tuple[tuple[str, int, Callable[[Recipe, int, int, str], list[str]], str, bool], ...] = (
    ("fullgraph, tensor parallel", 2, tensor_parallel_graph, "column and row", False),
    ("fullgraph, tensor and sequence parallel", 2, tensor_parallel_graph, "sequence", False),
    ("fullgraph by blocks, FSDP2", 2, fsdp_graph, "", False),
    ("FP8 all-gather", 2, gathered, "", True),
    ("FP8 all-gather with checkpointing", 2, gathered, "checkpointing", True),
    ("FP8 all-gather with four micro-batches", 2, gathered, "micro-batches", True),
    ("FP8 all-gather", 4, gathered, "", True),
    ("FP8 all-gather, HSDP", 4, gathered, "HSDP", True),
)
"""Name, ranks, function, its last argument, and whether it is for recipes with one scale per tensor only."""
