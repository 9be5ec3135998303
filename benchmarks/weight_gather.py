"""Measures the bytes of FSDP2's all-gathers with `gather_weights_in_fp8`, and without it.

    python benchmarks/weight_gather.py [--ranks 2 4]

Processes train a byte-level GPT with `CurrentScaling` under FSDP2 over gloo, a group for each block.
Parameters are float32, gathered in BF16 (`MixedPrecisionPolicy`), and gradients are reduced in BF16. Each
rank counts the bytes that its TCP connections have sent, as Linux counts them. Needs Linux.

Prints one JSON line; by number of ranks:

    forward             bytes sent by a rank in a forward pass without gradients: in FP8, and in BF16
    step                the same in a training step: two all-gathers of the blocks, gradients
    of_bf16             bytes of a forward pass in FP8 over those in BF16
    step_of_bf16        the same of a step
    predicted           bytes of a forward pass in FP8: a byte for each element of a weight of an FP8 layer,
                        two for others, times (ranks - 1) / ranks
    in_fp8              the share of the model's elements that travel in FP8
    equal               whether losses and weights are equal, bit for bit, after the steps
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from gradient_reduction import Counted
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from fp8scope.demo.model import ByteGpt, Shape
from fp8scope_kernels import CurrentScaling, convert, gather_weights_in_fp8

SHAPE = Shape(layers=2, width=256, heads=4, context=64)
BATCH, STEPS = 8, 5


def make(in_fp8: bool) -> tuple[Any, tuple[str, ...]]:
    """A sharded model, and the layers whose weights travel in FP8."""
    torch.manual_seed(0)
    model: Any = ByteGpt(SHAPE)
    convert(model, CurrentScaling())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, gather_weights_in_fp8(model) if in_fp8 else ()


def train(model: Any, rank: int) -> tuple[list[Tensor], float, float]:
    """The losses, and the median bytes of a forward pass and of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward, step, losses = Counted(), Counted(), []
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        batch = torch.randint(256, (BATCH, SHAPE.context + 1), generator=draw)
        with forward, torch.no_grad():
            model(batch[:, :-1])
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        with step:
            logits = model(batch[:, :-1]).flatten(0, 1).float()
            loss = functional.cross_entropy(logits, batch[:, 1:].flatten())
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, statistics.median(forward.bytes), statistics.median(step.bytes)


def job(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size)
    (plain, _), (model, layers) = make(False), make(True)
    losses, forward, step = train(plain, rank)
    losses_fp8, forward_fp8, step_fp8 = train(model, rank)
    weights = {f"{layer}.weight" for layer in layers}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    in_fp8 = sum(number for name, number in sizes.items() if name in weights)
    equal = [torch.equal(a, b) for a, b in zip(losses, losses_fp8, strict=True)]
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    equal += [torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs]
    if rank == 0:
        result = {
            "forward": [forward_fp8, forward],
            "step": [step_fp8, step],
            "of_bf16": round(forward_fp8 / forward, 4),
            "step_of_bf16": round(step_fp8 / step, 4),
            "predicted": round((2 * sum(sizes.values()) - in_fp8) * (size - 1) / size),
            "in_fp8": round(in_fp8 / sum(sizes.values()), 4),
            "equal": all(equal),
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the bytes of FSDP2's all-gathers.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    results = {}
    for size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(job, (size, folder), nprocs=size)  # type: ignore[no-untyped-call]
            results[str(size)] = json.loads(Path(folder, "result.json").read_text())
    print(json.dumps({"benchmark": "weight_gather", "ranks": results}))


if __name__ == "__main__":
    main()
