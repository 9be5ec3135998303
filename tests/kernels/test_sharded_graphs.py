"""Layers that are sharded, in graphs: no graph breaks, and the results of eager code bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.process_group import run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    gather_weights_in_fp8,
    keep_weights,
    observe,
)
from fp8scope_kernels.recipes import recipe_from_dict

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(history_length=2),
    CurrentScaling(),
    CurrentScaling(stochastic_gradients=True),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
)
STEPS = 3
Run = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """ReLU and sums round alike in every graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


PLANS: dict[str, dict[str, Any]] = {
    "pairs": {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    },
    "replicated": {
        "mlp.up": SequenceParallel(use_local_output=True),
        "mlp.down": SequenceParallel(use_local_output=True),
    },
}
"""In `sequence` and `replicated` a rank has a part of each sequence."""


def width_of(recipe: Recipe, size: int) -> int:
    return (128 if isinstance(recipe, BlockScaling) else 32) * size


def make(
    recipe: Recipe | None, plan: str, mesh: Any, width: int, blocks: int
) -> tuple[nn.Sequential, StatisticsBuffer]:
    torch.manual_seed(0)
    model, rows = nn.Sequential(*(Block(width) for _ in range(blocks))), StatisticsBuffer()
    if recipe is not None:
        convert(model, recipe)
    for block in model:
        if plan == "pairs":
            # A norm rounds otherwise where the default backend compiles it.
            block.norm = nn.Identity()
        parallelize_module(block, mesh, PLANS[plan])
    observe(model, rows)
    return model, rows


def train(run: Run, model: nn.Module, plan: str, rank: int, size: int, width: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x = torch.randn(2, width, width, generator=torch.Generator().manual_seed(step))
        if plan != "pairs":
            x = x.chunk(size, 1)[rank].contiguous()
        loss = run(x.requires_grad_()).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach().clone()


def everything(model: nn.Module, rows: StatisticsBuffer) -> dict[str, Tensor]:
    return {
        **{name: whole(p) for name, p in model.named_parameters()},
        **{f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        **{name: buffer.clone() for name, buffer in model.named_buffers()},
        "counters": rows.data.clone(),
        "block counters": rows.block_data.nan_to_num(),
    }


def different(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    assert expected.keys() == actual.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, actual[name])]


def in_graph(model: nn.Module, backend: Any) -> Run:
    compiled: Run = torch.compile(model, backend=backend, fullgraph=True)
    return compiled


def compare(
    recipe: Recipe,
    plan: str,
    mesh: Any,
    rank: int,
    size: int,
    compiled: Callable[[nn.Module], Run],
    blocks: int = 1,
) -> list[str]:
    """What differs between eager training on these ranks and the same in graphs."""
    torch.compiler.reset()
    width = width_of(recipe, size)
    (eager, expected), (model, rows) = (make(recipe, plan, mesh, width, blocks) for _ in range(2))
    losses = [train(run, m, plan, rank, size, width) for run, m in ((eager, eager), (compiled(model), model))]
    found = [] if losses[0] == losses[1] else [f"losses {losses[1]} for {losses[0]}"]
    found += different(everything(eager, expected), everything(model, rows))
    return [f"{recipe.kind}, {plan}: {difference}" for difference in found]


def job_tensor_parallel(rank: int, size: int, recipe: dict[str, Any], plan: str) -> list[str]:
    mesh = init_device_mesh("cpu", (size,))
    return compare(
        recipe_from_dict(recipe), plan, mesh, rank, size, lambda model: in_graph(model, "aot_eager")
    )


CASES = (
    *(("pairs", recipe, 2) for recipe in RECIPES),
    ("sequence", RECIPES[0], 2),
    ("replicated", RECIPES[3], 2),
    ("sequence", RECIPES[1], 4),
)


@pytest.mark.parametrize(("plan", "recipe", "size"), CASES, ids=str)
def test_it_works(plan: str, recipe: Recipe, size: int) -> None:
    """Column, row and sequence parallelism: one graph, equal bits, equal counters."""
    for failures in run_ranks(job_tensor_parallel, size, recipe.to_dict(), plan):
        assert failures == []


def job_other_graphs(rank: int, size: int, name: str) -> list[Any]:
    mesh, counter = init_device_mesh("cpu", (size,)), CompileCounterWithBackend("aot_eager")

    def checkpointed(model: nn.Module) -> Run:
        return in_graph(lambda x: checkpoint(model, x, use_reentrant=False), "aot_eager")  # type: ignore[arg-type]

    def by_blocks(model: Any) -> Run:
        for block in model:
            block.compile(backend=counter, fullgraph=True)
        run: Run = model
        return run

    def kept(model: nn.Module) -> Run:
        run = in_graph(model, "aot_eager")

        def call(x: Tensor) -> Tensor:
            with keep_weights(model):
                return run(x)

        return call

    how = {"checkpointing": checkpointed, "blocks": by_blocks, "kept weights": kept}[name]
    blocks = 2 if name == "blocks" else 1
    return [compare(RECIPES[0], "pairs", mesh, rank, size, how, blocks), counter.frame_count]


@pytest.mark.parametrize("how", ["checkpointing", "blocks", "kept weights"])
def test_other_graphs(how: str) -> None:
    """Two blocks of the same shape share a graph."""
    for failures, graphs in run_ranks(job_other_graphs, 2, how):
        assert failures == []
        assert graphs == (1 if how == "blocks" else 0)


def job_default_backend(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,))
    return compare(DelayedScaling(), "pairs", mesh, rank, size, lambda model: in_graph(model, "inductor"))


def test_the_default_backend() -> None:
    for failures in run_ranks(job_default_backend, 2):
        assert failures == []


def job_observed(rank: int, size: int) -> list[str]:
    """Layers in high precision, whose observers count this rank's parts."""
    mesh = init_device_mesh("cpu", (size,))
    (eager, expected), (model, rows) = (make(None, "pairs", mesh, 32, 1) for _ in range(2))
    run, found = in_graph(model, "aot_eager"), []
    for step in range(2):
        for call, buffer in ((eager, expected), (run, rows)):
            buffer.zero_()
            x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(step))
            torch.autograd.backward(call(x.requires_grad_()).square().mean())
        found += [
            f"step {step}: {name}" for name in different(everything(eager, expected), everything(model, rows))
        ]
    return found if bool(expected.data[:, 0].all()) else ["nothing was counted"]


def test_layers_in_high_precision_are_observed_in_one_graph() -> None:
    for failures in run_ranks(job_observed, 2):
        assert failures == []


def job_errors(rank: int, size: int) -> list[str]:
    """Shards that cut blocks are refused when the graph runs, on all ranks."""
    mesh, messages = init_device_mesh("cpu", (size,)), []
    model = nn.Sequential(nn.Linear(128, 192 * size))
    convert(model, BlockScaling())
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    try:
        in_graph(model, "aot_eager")(torch.ones(4, 128))
    except ValueError as error:
        messages.append(str(error))
    dist.barrier()
    return messages


def test_cut_blocks_are_refused() -> None:
    for messages in run_ranks(job_errors, 2):
        assert len(messages) == 1
        assert "tensor parallelism cuts them" in messages[0]


# FSDP2


def make_sharded(recipe: Recipe, mesh: Any = None) -> tuple[nn.Sequential, StatisticsBuffer]:
    torch.manual_seed(0)
    model, rows = nn.Sequential(Block(64), Block(64)), StatisticsBuffer()
    convert(model, recipe)
    if mesh is not None:
        for block in model:
            parallelize_module(block, mesh["tensor"], PLANS["sequence"])
    for module in (*model, model):
        fully_shard(module, mesh=None if mesh is None else mesh["data"])
    observe(model, rows)
    return model, rows


def compare_sharded(
    recipe: Recipe, rank: int, compiled: Callable[[Any], Run], mesh: Any = None, gather: bool = False
) -> list[str]:
    torch.compiler.reset()
    (eager, expected), (model, rows) = make_sharded(recipe, mesh), make_sharded(recipe, mesh)
    if gather:
        gather_weights_in_fp8(model)
    plan, parts = ("pairs", 1) if mesh is None else ("sequence", 2)
    losses = [
        train(run, m, plan, rank % parts, parts, 64) for run, m in ((eager, eager), (compiled(model), model))
    ]
    found = [] if losses[0] == losses[1] else [f"losses {losses[1]} for {losses[0]}"]
    return [
        f"{recipe.kind}, {gather}: {difference}"
        for difference in found + different(everything(eager, expected), everything(model, rows))
    ]


def job_fsdp(rank: int, size: int) -> list[str]:
    failures = []

    def by_blocks(fullgraph: bool) -> Callable[[Any], Run]:
        def compiled(model: Any) -> Run:
            for block in model:
                block.compile(backend="aot_eager", fullgraph=fullgraph)
            run: Run = model
            return run

        return compiled

    def as_a_whole(model: nn.Module) -> Run:
        run: Run = torch.compile(model, backend="aot_eager")
        return run

    for recipe in (DelayedScaling(history_length=2), CurrentScaling(), MXFP8()):
        failures += compare_sharded(recipe, rank, by_blocks(True))
        failures += compare_sharded(recipe, rank, as_a_whole)
    for recipe in (DelayedScaling(history_length=2), CurrentScaling()):
        failures += compare_sharded(recipe, rank, by_blocks(False), gather=True)
        failures += compare_sharded(recipe, rank, as_a_whole, gather=True)
    return failures


def test_blocks_of_fsdp_are_graphs() -> None:
    """`fully_shard` computes outside of graphs: torch breaks a graph of the whole model at its hooks."""
    for failures in run_ranks(job_fsdp, 2):
        assert failures == []


def job_fsdp_refuses(rank: int, size: int) -> str:
    model = nn.Sequential(nn.Linear(32, 32))
    fully_shard(model)
    try:
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 32))
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


def test_torch_cannot_compile_a_whole_model_of_fsdp_in_one_graph() -> None:
    """What docs/distributed.md says of torch, without a layer of ours: it fails when that has changed."""
    for message in run_ranks(job_fsdp_refuses, 2):
        assert "Attempted to call function marked as skipped" in message


def job_both(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def by_blocks(model: Any) -> Run:
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
        run: Run = model
        return run

    return [
        failure
        for recipe in (DelayedScaling(history_length=2), RowwiseScaling())
        for failure in compare_sharded(recipe, rank, by_blocks, mesh)
    ]


def test_blocks_of_fsdp_over_tensor_parallelism() -> None:
    for failures in run_ranks(job_both, 4):
        assert failures == []
