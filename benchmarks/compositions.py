"""Trains a model with FP8 layers under compositions of torch, and compares each with eager code on one rank.

    python benchmarks/compositions.py [--only tensor] [--list]

Processes talk over gloo. The model has two blocks of a norm and an MLP; it is trained for three steps with
each recipe that the composition is for. Prints one JSON line for each composition:

    composition   its name
    ranks         the number of processes
    failures      the number of differences
    compared      what was compared with one rank
    worst         the largest relative error of a loss, and of a parameter's update (L2)
    seconds       CPU time of rank 0
    first         the first difference, if there is one

Losses may differ by the rounding of the product to BF16 (2^-8), by four times that where each rank chooses
scales for its own part of the batch. Updates may differ by half of the rounding of both operands' formats.
Counters, scales and histories must be equal where all ranks share a batch, bit for bit.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from composition_graphs import GRAPHS
from composition_sharded import SHARDED
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    MXFP4,
    MXFP8,
    NVFP4,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    observe,
)

STEPS = 3
WIDTH, BATCH, TOKENS = 128, 4, 128
ROUNDING = 2**-8
UPDATE = (2**-4 + 2**-3) / 2
RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(history_length=2), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8(),
)  # fmt: skip
COUNTS = [STATISTICS.index(name) for name in STATISTICS if name not in ("amax", "scale")]
EXACT = "losses, updates; counters, scales and histories bit for bit"
ABOUT = "losses, updates"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


@dataclass
class Outcome:
    """What a rank has found of one composition."""

    failures: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=lambda: [0.0])
    updates: list[float] = field(default_factory=lambda: [0.0])

    def compare(
        self, name: str, model: nn.Module, losses: list[float], recipe: Recipe, tolerance: float
    ) -> nn.Module:
        """Compare a trained model with the same on one rank, which is returned."""
        alone, start = make(recipe), weights_of(make(None))
        for got, expected in zip(losses, train(alone), strict=True):
            self.losses.append(abs(got / expected - 1))
            if not self.losses[-1] < tolerance:
                self.failures.append(f"{name}: loss {got} for {expected}")
        expected_weights = weights_of(alone)
        for key, weight in weights_of(model).items():
            update = expected_weights[key] - start[key]
            self.updates.append(float((weight - expected_weights[key]).norm() / update.norm()))
            if not self.updates[-1] < UPDATE:
                self.failures.append(f"{name}: the update of {key} is off by {self.updates[-1]:.3f}")
        return alone

    def compare_states(self, name: str, model: nn.Module, alone: nn.Module) -> None:
        buffers = dict(alone.named_buffers())
        for key, buffer in model.named_buffers():
            if not torch.equal(buffer, buffers[key]):
                self.failures.append(f"{name}: {key} is {buffer.tolist()} for {buffers[key].tolist()}")

    def compare_rows(self, name: str, rows: StatisticsBuffer, alone: StatisticsBuffer, size: int) -> None:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, rows.data)
        total = torch.stack(parts).sum(0)
        if not torch.equal(total[:, COUNTS], alone.data[:, COUNTS]):
            self.failures.append(f"{name}: counters differ")


def make(recipe: Recipe | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if recipe is not None:
        convert(model, recipe)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(y: Tensor, x: Tensor) -> Tensor:
    return (y - x.roll(1, -1)).square().mean()


def train(
    model: nn.Module,
    cut: Callable[[Tensor], Tensor] = lambda x: x,
    parts: int = 1,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> list[float]:
    """The losses of the whole batch, of which this rank has what `cut` takes; `parts` share a sequence."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        x = cut(batch(step))
        loss = loss_of(run(model, x), x)
        optimizer.zero_grad()
        (loss / parts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total = loss.detach().clone()
        if x.shape != batch(step).shape:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(parameter) for name, parameter in model.named_parameters()}


def part(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return x.chunk(size, dim)[rank].contiguous()


# --- compositions: the outcome of this rank -------------------------------------------------------------


def parallelize(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def make_parallel(recipe: Recipe, mesh: Any, first: str = "convert") -> nn.Sequential:
    if first == "convert":
        return parallelize(make(recipe), mesh)
    model = parallelize(make(None), mesh)
    convert(model, recipe)
    return model


def tensor_parallel(rank: int, size: int, first: str) -> Outcome:
    """Column, row and sequence parallel training; then counters of a layer by columns and of one by rows."""
    outcome, mesh = Outcome(), init_device_mesh("cpu", (size,))
    for recipe in RECIPES:
        model = make_parallel(recipe, mesh, first)
        losses = train(model, lambda x: part(x, 1, rank, size), size)
        outcome.compare(recipe.kind, model, losses, recipe, ROUNDING)
        for style, dims in ((ColwiseParallel(), (None, 2)), (RowwiseParallel(), (2, None))):
            alone, sharded = (nn.Sequential(nn.Linear(512, 512)) for _ in range(2))
            sharded.load_state_dict(alone.state_dict())
            for parameter in alone.parameters():
                dist.broadcast(parameter.data, 0)
            for step in (
                (convert, parallelize_module) if first == "convert" else (parallelize_module, convert)
            ):
                if step is convert:
                    convert(sharded, recipe)
                else:
                    parallelize_module(sharded, mesh, {"0": style})
            convert(alone, recipe)
            count_layer(outcome, f"{recipe.kind}, {type(style).__name__}", alone, sharded, dims, rank, size)
    return outcome


def count_layer(
    outcome: Outcome,
    name: str,
    alone: nn.Module,
    sharded: nn.Module,
    dims: tuple[int | None, int | None],
    rank: int,
    size: int,
) -> None:
    """Call both with the same input and the same gradient of the output."""
    buffers = StatisticsBuffer(), StatisticsBuffer()
    observe(alone, buffers[0])
    observe(sharded, buffers[1])
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        scale = torch.logspace(-4, 1, 512) * 3**step
        x, grad = (torch.randn(64, 512, generator=generator)[None] * scale for _ in range(2))
        for model, (in_dim, out_dim) in ((alone, (None, None)), (sharded, dims)):
            own_x, own_grad = (
                tensor if dim is None else part(tensor, dim, rank, size)
                for tensor, dim in ((x, in_dim), (grad, out_dim))
            )
            model(own_x.requires_grad_()).backward(own_grad)
    outcome.compare_rows(name, buffers[1], buffers[0], size)
    outcome.compare_states(name, sharded, alone)


def sharded_twice(rank: int, size: int, how: str) -> Outcome:
    """FSDP2 around tensor parallelism."""
    outcome = Outcome()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    for recipe in RECIPES:
        with torch.device("meta" if how == "meta" else "cpu"):
            model = make_parallel(recipe, mesh["tensor"])
        for module in (*model, model):
            fully_shard(module, mesh=mesh["data"])
        if how == "meta":
            model.to_empty(device="cpu")
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_model_state_dict(model, make(None).state_dict(), options=options)
        losses = train(model, lambda x: part(part(x, 0, rank // 2, size // 2), 1, rank % 2, 2), 2)
        outcome.compare(recipe.kind, model, losses, recipe, 4 * ROUNDING)
    return outcome


def data_parallel(rank: int, size: int, how: str) -> Outcome:
    outcome = Outcome()
    for recipe in RECIPES:
        model: Any = make(recipe)
        if how == "ddp":
            model = DistributedDataParallel(model)
        else:
            shape, names = ((2, size // 2), ("copy", "shard")) if how == "hsdp" else ((size,), ("shard",))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
        losses = train(model, lambda x: part(x, 0, rank, size))
        outcome.compare(recipe.kind, model, losses, recipe, 4 * ROUNDING)
    return outcome


def checkpoints(rank: int, size: int, how: str) -> Outcome:
    """A checkpoint of two ranks, read by one and by all."""
    outcome, recipe = Outcome(), RECIPES[0]
    pair = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copy", "tensor"))["tensor"]
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, 0)
        model = make_parallel(recipe, pair)
        train(model, lambda x: part(x, 1, rank % 2, 2), 2)
        write(get_model_state_dict(model), checkpoint_id=folders[0])
        alone, sharded = make(recipe), make_parallel(recipe, init_device_mesh("cpu", (size,)))
        state: dict[str, Any] = alone.state_dict()
        read(state, checkpoint_id=folders[0], no_dist=True)
        alone.load_state_dict(state)
        state = get_model_state_dict(sharded)
        read(state, checkpoint_id=folders[0])
        set_model_state_dict(sharded, state)
        dist.barrier()
    for key, weight in weights_of(sharded).items():
        if not torch.equal(weight, dict(alone.named_parameters())[key]):
            outcome.failures.append(f"{key} differs")
    outcome.compare_states("buffers", sharded, alone)
    x = batch(9)
    outcome.losses.append(
        float((sharded(part(x, 1, rank, size)) - part(alone(x), 1, rank, size)).norm() / x.norm())
    )
    if not outcome.losses[-1] < ROUNDING:
        outcome.failures.append(f"the output is off by {outcome.losses[-1]:.1e}")
    return outcome


def pipeline(rank: int, size: int, how: str) -> Outcome:
    """1F1B with four micro-batches, against one process that takes them in turn."""
    outcome = Outcome()
    for recipe in RECIPES:
        stage, alone = make(recipe)[rank], make(recipe)
        run = Checkpointed(stage) if how == "checkpointed" else stage
        rows, expected = StatisticsBuffer(), StatisticsBuffer()
        observe(stage, rows)
        observe(alone[rank], expected)
        x = batch(0)
        example = x[:1].clone().requires_grad_()
        schedule = Schedule1F1B(
            PipelineStage(run, rank, size, torch.device("cpu"), x[:1] if rank == 0 else example, example),
            BATCH,
            loss_of,
            scale_grads=False,
        )
        for _ in range(STEPS):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x)
            for row in torch.split(x, 1):
                loss_of(alone(row), row).backward()  # type: ignore[no-untyped-call]
        for key, parameter in stage.named_parameters():
            own = dict(alone[rank].named_parameters())[key]
            if parameter.grad is None or own.grad is None or not torch.equal(parameter.grad, own.grad):
                outcome.failures.append(f"{recipe.kind}: the gradient of {key} differs")
        if not torch.equal(rows.data, expected.data):
            outcome.failures.append(f"{recipe.kind}: counters differ")
        outcome.compare_states(recipe.kind, stage, alone[rank])
    return outcome


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def recomputed(rank: int, size: int, how: str) -> Outcome:
    """Several forward calls before one backward call, with and without activation checkpointing."""
    outcome = Outcome()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        blocks = list(model.children())
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=how == "reentrant") if model is own else block(x)
        return x

    for recipe in RECIPES:
        own, alone = make(recipe), make(recipe)
        gradients = []
        for model in (own, alone):
            inputs = [3.0**index * batch(index).requires_grad_() for index in range(4)]
            torch.stack([loss_of(run(model, x), x) for x in inputs]).sum().backward()  # type: ignore[no-untyped-call]
            gradients.append(weights_of_gradients(model))
        for key, gradient in gradients[0].items():
            # A reentrant region adds up its gradients of a weight in another order.
            tolerance = 1e-5 if how == "reentrant" else 0.0
            error = float((gradient - gradients[1][key]).norm() / gradients[1][key].norm())
            outcome.updates.append(error)
            if not error <= tolerance:
                outcome.failures.append(f"{recipe.kind}: the gradient of {key} is off by {error:.1e}")
        outcome.compare_states(recipe.kind, own, alone)
    return outcome


def in_graph(rank: int, size: int, how: str) -> Outcome:
    """Compiled, exported, recorded or transformed, bit for bit; see composition_graphs.py."""
    outcome = Outcome()
    for recipe in (*RECIPES, MXFP4(), NVFP4()):
        torch.compiler.reset()
        outcome.failures += [f"{recipe.kind}: {difference}" for difference in GRAPHS[how](recipe)]
    return outcome


def in_shards(rank: int, size: int, how: str) -> Outcome:
    """Sharded, in graphs or with FP8 all-gather, bit for bit; see composition_sharded.py."""
    outcome = Outcome()
    _, _, function, setting, is_for_whole = SHARDED[int(how)]
    for recipe in RECIPES[:2] if is_for_whole else RECIPES:
        torch.compiler.reset()
        outcome.failures += [f"{recipe.kind}: {line}" for line in function(recipe, rank, size, setting)]
    return outcome


def weights_of_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True, kw_only=True)
class Composition:
    """`run` takes rank, number of ranks and `how`."""

    name: str
    ranks: int
    run: Callable[[int, int, str], Outcome]
    how: str = ""
    compared: str = ABOUT


def compositions() -> Iterator[Composition]:
    exact = "gradients, counters and scaling state bit for bit"
    for ranks in (2, 4):
        for order, first in (("after convert", "convert"), ("before convert", "parallelize")):
            yield Composition(
                name=f"tensor and sequence parallel {order}",
                ranks=ranks, run=tensor_parallel, how=first, compared=EXACT,
            )  # fmt: skip
    yield Composition(name="DDP", ranks=2, run=data_parallel, how="ddp")
    yield Composition(name="FSDP2", ranks=2, run=data_parallel, how="fsdp")
    yield Composition(name="HSDP", ranks=4, run=data_parallel, how="hsdp")
    yield Composition(name="FSDP2 over tensor parallel", ranks=4, run=sharded_twice)
    yield Composition(
        name="FSDP2 over tensor parallel from the meta device", ranks=4, run=sharded_twice, how="meta"
    )
    yield Composition(
        name="distributed checkpoint of 2 ranks on 1 and 4", ranks=4, run=checkpoints,
        compared="weights and scaling state bit for bit; output",
    )  # fmt: skip
    yield Composition(name="pipeline 1F1B", ranks=2, run=pipeline, compared=exact)
    yield Composition(
        name="pipeline 1F1B with checkpointing", ranks=2, run=pipeline, how="checkpointed", compared=exact
    )
    for how in ("hooks", "reentrant"):
        yield Composition(
            name=f"checkpointing ({how}), several forward calls first", ranks=1, run=recomputed, how=how,
            compared="gradients; scaling state bit for bit",
        )  # fmt: skip
    for index, (name, ranks, *_) in enumerate(SHARDED):
        yield Composition(
            name=name, ranks=ranks, run=in_shards, how=str(index),
            compared="everything, bit for bit, with eager code and BF16 on the same ranks",
        )  # fmt: skip
    for name in GRAPHS:
        yield Composition(
            name=name, ranks=1, run=in_graph, how=name,
            compared="shapes" if name == "FakeTensorMode" else "everything, bit for bit",
        )  # fmt: skip


def serve(rank: int, size: int, directory: str, only: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store-{size}", rank=rank, world_size=size
    )
    for composition in compositions():
        if composition.ranks != size or only not in composition.name:
            continue
        began = time.process_time()
        try:
            outcome = composition.run(rank, size, composition.how)
        except Exception as error:
            # Other ranks may wait for this one: what follows would not be measured.
            outcome = Outcome([f"{type(error).__name__}: {error}"])
        outcomes: list[Any] = [None] * size
        dist.all_gather_object(outcomes, outcome)
        if rank == 0:
            report(composition, outcomes, time.process_time() - began)
    dist.destroy_process_group()


def report(composition: Composition, outcomes: list[Outcome], seconds: float) -> None:
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    worst = {
        "loss": max(max(outcome.losses) for outcome in outcomes),
        "update": max(max(outcome.updates) for outcome in outcomes),
    }
    line = {
        "composition": composition.name,
        "ranks": composition.ranks,
        "failures": len(failures),
        "compared": composition.compared,
        "worst": {name: float(f"{value:.2e}") for name, value in worst.items()},
        "seconds": round(seconds, 1),
    }
    print(json.dumps(line | ({"first": failures[0]} if failures else {})), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare compositions of torch with eager code.")
    parser.add_argument("--only", default="", help="compositions with this text in their name")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    chosen = [composition for composition in compositions() if arguments.only in composition.name]
    if arguments.list:
        print("\n".join(composition.name for composition in chosen))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        for size in sorted({composition.ranks for composition in chosen}):
            spawn(serve, (size, directory, arguments.only), nprocs=size)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
