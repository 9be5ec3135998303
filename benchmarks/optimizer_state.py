"""Measures the memory that an optimizer with FP8 and FP16 state saves, and its effect on the loss.

    python benchmarks/optimizer_state.py [--seeds N] [--steps N] [--ranks 2 4]

Trains a small byte-level GPT in float32 with torch's AdamW and with `Fp8AdamW`, with the same seeds and
batches and a cosine schedule. Prints one JSON line per run, one per level over all seeds, and one per number
of ranks for O3, which trains bit for bit like O2:

    bytes_per_parameter     optimizer state, without the model's weights (O3: on the rank with the most)
    loss                    loss on held-out text, nats per byte
    loss_over_adamw         mean over the seeds of the ratio to AdamW's loss; `range` is its range
    adamw_spread            relative standard deviation of AdamW's loss over the seeds
    step_ms                 median time of an optimizer step, eager, on this CPU
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fp8scope.demo.data import Corpus, load
from fp8scope.demo.model import ByteGpt, Shape
from fp8scope_kernels.optimizer import Fp8AdamW

BATCH = 16
PEAK_LR = 3e-3
OPTIMIZERS = ("AdamW", "O1", "O2")


def make_optimizer(name: str, model: ByteGpt) -> Optimizer:
    if name == "AdamW":
        return AdamW(model.parameters(), lr=PEAK_LR)
    return Fp8AdamW(model.parameters(), lr=PEAK_LR, level=name)  # type: ignore[arg-type]


def loss_of(model: ByteGpt, text: Tensor) -> Tensor:
    return functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])


def bytes_per_parameter(optimizer: Optimizer, parameters: int) -> float:
    """Return the bytes of all tensors in the optimizer's state, including scales and step counters."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return round(sum(tensor.nbytes for tensor in tensors) / parameters, 3)


def train(name: str, seed: int, steps: int, corpus: Corpus, shape: Shape) -> dict[str, object]:
    torch.manual_seed(seed)
    model = ByteGpt(shape)
    optimizer = make_optimizer(name, model)
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
    return {
        "optimizer": name,
        "seed": seed,
        "steps": steps,
        "parameters": parameters,
        "bytes_per_parameter": bytes_per_parameter(optimizer, parameters),
        "loss": round(held_out, 5),
        "step_ms": round(statistics.median(times), 3),
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, to measure the spread over seeds.")
    shape = Shape()
    corpus = load(shape.context, windows=256)
    losses: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for seed in range(1, arguments.seeds + 1):
        for name in OPTIMIZERS:
            run = train(name, seed, arguments.steps, corpus, shape)
            losses[name].append(float(str(run["loss"])))
            print(json.dumps(run), flush=True)
    spread = statistics.stdev(losses["AdamW"]) / statistics.mean(losses["AdamW"])
    for name in OPTIMIZERS[1:]:
        ratios = [ours / theirs for ours, theirs in zip(losses[name], losses["AdamW"], strict=True)]
        summary = {
            "optimizer": name,
            "seeds": arguments.seeds,
            "loss_over_adamw": round(statistics.mean(ratios), 5),
            "range": [round(min(ratios), 5), round(max(ratios), 5)],
            "adamw_spread": round(spread, 5),
        }
        print(json.dumps(summary), flush=True)
    for ranks in arguments.ranks:
        print(json.dumps(sharded_bytes(ranks, shape)), flush=True)


if __name__ == "__main__":
    main()
