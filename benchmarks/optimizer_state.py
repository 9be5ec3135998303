"""Measures the memory that an optimizer with FP8 and FP16 state saves, and its effect on the loss.

    python benchmarks/optimizer_state.py [--seeds N] [--steps N] [--beta1 0.9 0.95] [--ranks 2 4]

Trains a small byte-level GPT in float32 with torch's AdamW and with `Fp8AdamW`, with the same seeds and
batches and a cosine schedule. Prints one JSON line per run, one per level and beta1 over all seeds, and one
per number of ranks for O3, which trains bit for bit like O2:

    bytes_per_parameter     optimizer state, without the model's weights (O3: on the rank with the most)
    loss                    loss on held-out text, nats per byte
    loss_over_adamw         mean over the seeds of the ratio to AdamW's loss; `range` is its range
    adamw_spread            relative standard deviation of AdamW's loss over the seeds
    step_ms                 median time of an optimizer step, eager, on this CPU

Then one line per block size of the first moment (0: one scale a tensor), in E4M3 rounded to nearest:

    flushed                 per cent of the elements other than 0 that become 0: the moments that AdamW had at
                            the end of the first training
    flushed_rows_of_64      the same with rows of 64 elements that differ by factors from 2^-20 to 1
    flushed_rows_of_256     the same with rows of 256
    bytes_per_parameter     of the first moment

and one per way to update many small tensors:

    step_ms                 processor time of a step, the least of five, taken in turn
    over_adamw              over that of torch's AdamW with `foreach`
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fp8scope.demo.data import Corpus, load
from fp8scope.demo.model import ByteGpt, Shape
from fp8scope_kernels import E4M3, BlockScaling, Fp8AdamW, quantize_blocks

BATCH = 16
PEAK_LR = 3e-3
OPTIMIZERS = ("AdamW", "O1", "O2")
BLOCKS = (0, 1024, 512, 256, 128, 64)


def make_optimizer(name: str, model: ByteGpt, beta1: float = 0.9) -> Optimizer:
    betas = (beta1, 0.999)
    if name == "AdamW":
        return AdamW(model.parameters(), lr=PEAK_LR, betas=betas)
    return Fp8AdamW(model.parameters(), lr=PEAK_LR, betas=betas, level=name)  # type: ignore[arg-type]


def loss_of(model: ByteGpt, text: Tensor) -> Tensor:
    return functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])


def bytes_per_parameter(optimizer: Optimizer, parameters: int) -> float:
    """Return the bytes of all tensors in the optimizer's state, including scales and step counters."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return round(sum(tensor.nbytes for tensor in tensors) / parameters, 3)


def train(
    name: str, seed: int, beta1: float, steps: int, corpus: Corpus, shape: Shape
) -> tuple[dict[str, object], Optimizer]:
    torch.manual_seed(seed)
    model = ByteGpt(shape)
    optimizer = make_optimizer(name, model, beta1)
    schedule = LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * i / steps))
    )
    times = []
    for step in range(steps):
        loss = loss_of(model, corpus.batch(steps * seed + step, BATCH))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        schedule.step()
    with torch.no_grad():
        held_out = loss_of(model, corpus.windows).item()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    figures = {
        "optimizer": name,
        "seed": seed,
        "beta1": beta1,
        "steps": steps,
        "parameters": parameters,
        "bytes_per_parameter": bytes_per_parameter(optimizer, parameters),
        "loss": round(held_out, 5),
        "step_ms": round(statistics.median(times), 3),
    }
    return figures, optimizer


def flushed(moments: Sequence[Tensor], block: int) -> float:
    """The share of the moments that E4M3 makes 0, with a scale for each `block` elements, 0 for a tensor."""
    lost = there = 0
    for moment in moments:
        row = moment.reshape(1, -1)
        blocks = quantize_blocks(row, E4M3, (1, block), BlockScaling(power_of_two=False))
        lost += int(((blocks.values == 0) & (row != 0)).sum())
        there += int((moment != 0).sum())
    return 100.0 * lost / there


def with_rows(moments: Sequence[Tensor], width: int) -> list[Tensor]:
    """The moments in rows that differ, without what fills no row."""
    random = torch.Generator().manual_seed(0)
    matrices = [m.flatten()[: m.numel() // width * width].view(-1, width) for m in moments]
    return [m * torch.exp2(-20 * torch.rand(len(m), 1, generator=random)) for m in matrices if len(m)]


def flush_rates(moments: Sequence[Tensor]) -> Iterator[dict[str, object]]:
    """The lines of the block sizes."""
    elements = sum(moment.numel() for moment in moments)
    for block in BLOCKS:
        scales = sum(-(-moment.numel() // block) if block else 1 for moment in moments)
        yield {
            "block": block,
            "flushed": round(flushed(moments, block), 4),
            "flushed_rows_of_64": round(flushed(with_rows(moments, 64), block), 2),
            "flushed_rows_of_256": round(flushed(with_rows(moments, 256), block), 2),
            "bytes_per_parameter": round(1 + 4 * scales / elements, 4),
        }


def small_tensors(number: int, size: int) -> Iterator[dict[str, object]]:
    """The lines of the ways to update many small tensors."""
    optimizers: dict[str, Optimizer] = {
        "AdamW, foreach": AdamW(_with_gradients(number, size), foreach=True),
        "AdamW, one by one": AdamW(_with_gradients(number, size), foreach=False),
        "O1": Fp8AdamW(_with_gradients(number, size), level="O1"),
        "O2": Fp8AdamW(_with_gradients(number, size)),
        "O2, one by one": Fp8AdamW(_with_gradients(number, size), foreach=False),
    }
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(6):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            times[name].append(1e3 * (time.process_time() - start))
    for name, taken in times.items():
        # The first step makes the state.
        least, reference = min(taken[1:]), min(times["AdamW, foreach"][1:])
        yield {
            "optimizer": name,
            "tensors": number,
            "elements": size,
            "step_ms": round(least, 2),
            "over_adamw": round(least / reference, 2),
        }


def _with_gradients(number: int, size: int) -> list[Tensor]:
    parameters: list[Tensor] = [nn.Parameter(torch.ones(size)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.ones(size)
    return parameters


def state_on_rank(rank: int, ranks: int, directory: str, shape: Shape) -> None:
    """Make one step at O3 and write this rank's bytes per parameter to a file."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks
    )
    torch.manual_seed(0)
    model = ByteGpt(shape)
    optimizer = make_optimizer("O3", model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    Path(directory, f"{rank}").write_text(str(bytes_per_parameter(optimizer, parameters)))
    distributed.destroy_process_group()


def sharded_bytes(ranks: int, shape: Shape) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        spawn(state_on_rank, (ranks, directory, shape), nprocs=ranks)  # type: ignore[no-untyped-call]
        each = [float(Path(directory, f"{rank}").read_text()) for rank in range(ranks)]
    return {"optimizer": "O3", "ranks": ranks, "bytes_per_parameter": max(each)}


def summarize(losses: dict[str, list[float]], beta1: float) -> None:
    """Print the line of each level."""
    spread = statistics.stdev(losses["AdamW"]) / statistics.mean(losses["AdamW"])
    for name in OPTIMIZERS[1:]:
        ratios = [ours / theirs for ours, theirs in zip(losses[name], losses["AdamW"], strict=True)]
        summary = {
            "optimizer": name,
            "beta1": beta1,
            "seeds": len(ratios),
            "loss_over_adamw": round(statistics.mean(ratios), 5),
            "range": [round(min(ratios), 5), round(max(ratios), 5)],
            "adamw_spread": round(spread, 5),
        }
        print(json.dumps(summary), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--beta1", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, to measure the spread over seeds.")
    shape = Shape()
    corpus = load(shape.context, windows=256)
    moments: list[Tensor] = []
    for beta1 in arguments.beta1:
        losses: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
        for seed in range(1, arguments.seeds + 1):
            for name in OPTIMIZERS:
                run, optimizer = train(name, seed, beta1, arguments.steps, corpus, shape)
                losses[name].append(float(str(run["loss"])))
                print(json.dumps(run), flush=True)
                moments = moments or [state["exp_avg"] for state in optimizer.state.values()]
        summarize(losses, beta1)
    for line in (*flush_rates(moments), *small_tensors(1000, 64)):
        print(json.dumps(line), flush=True)
    for ranks in arguments.ranks:
        print(json.dumps(sharded_bytes(ranks, shape)), flush=True)


if __name__ == "__main__":
    main()
