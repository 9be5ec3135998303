"""Holds the proposed split of a pipeline against the pipeline itself.

    python benchmarks/pipeline_split.py [--rounds N] [--repeats N] [--micro-batches N]

Four processes (gloo) each measure all layers of a toy model, all at once, as they share the machine later.
Costs are medians over the processes. Then they run the model as a pipeline (1F1B) with the proposed split and
with the uniform one, and each measures the processor time of its own stage for each micro-batch. Costs are
measured again after each round, because the speed of a shared machine drifts. Prints one JSON line:

    error              predicted over measured time of the proposed split's worst stage, minus 1: the median
                       over the rounds (goal: at most 0.1); `uniform_error`: of the uniform split
    largest_error      of both splits and all rounds, without its sign
    proposed, uniform  the splits
    worst_ms           measured time of the worst stage; `gain`: uniform over proposed
    same_stage         rounds in which the slowest stage was the predicted one, of `rounds`
"""

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from fp8scope.planning.layer_costs import measure
from fp8scope.planning.pipeline_split import (
    LayerCost,
    PipelineCosts,
    best_split,
    uniform_split,
)

STAGES = 4
ROWS, WIDTH = 256, 512
EXPANSIONS = (1, 1, 2, 1, 4, 1, 1, 2, 6, 1, 1, 3)
"""Hidden width of each layer over WIDTH: layers of a real model differ less."""


class Block(nn.Module):
    def __init__(self, expansion: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, expansion * WIDTH), nn.Linear(expansion * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(expansion) for expansion in EXPANSIONS]


def run_stage(rank: int, split: Sequence[int], micro_batches: int) -> float:
    """Run this rank's stage for one step; returns the median processor time of a micro-batch in seconds."""
    begin = sum(split[:rank])
    layers = nn.Sequential(*model()[begin : begin + split[rank]])
    forwards, backwards = [], []
    waiting: deque[tuple[Tensor, Tensor]] = deque()
    sending: list[Any] = []
    warm_up = min(STAGES - 1 - rank, micro_batches)

    def forward() -> None:
        x = torch.randn(ROWS, WIDTH)
        if rank:
            dist.recv(x, rank - 1)
        began = time.process_time()
        x.requires_grad_()
        y = layers(x)
        forwards.append(time.process_time() - began)
        waiting.append((x, y))
        if rank < STAGES - 1:
            sending.append(dist.isend(y.detach(), rank + 1))

    def backward() -> None:
        x, y = waiting.popleft()
        grad = torch.ones_like(y)
        if rank < STAGES - 1:
            dist.recv(grad, rank + 1)
        began = time.process_time()
        y.backward(grad)  # type: ignore[no-untyped-call]
        backwards.append(time.process_time() - began)
        if rank:
            assert x.grad is not None
            sending.append(dist.isend(x.grad, rank - 1))

    for _ in range(warm_up):
        forward()
    for _ in range(micro_batches - warm_up):
        forward()
        backward()
    for _ in range(warm_up):
        backward()
    for request in sending:
        request.wait()
    dist.barrier()
    return median(f + b for f, b in zip(forwards[1:], backwards[1:], strict=True))


def work(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=STAGES)
    rounds = []
    before = layer_costs(options.repeats)
    pipeline = PipelineCosts(layers=before, stages=STAGES, micro_batches=options.micro_batches)
    layers = {"proposed": best_split(pipeline).layers, "uniform": uniform_split(pipeline).layers}
    for _ in range(options.rounds):
        measured = {
            name: gathered(run_stage(rank, split, options.micro_batches)) for name, split in layers.items()
        }
        after = layer_costs(options.repeats)
        # The speed of a shared machine drifts: costs are those from around the run.
        costs = [replace(b, seconds=(a.seconds + b.seconds) / 2) for a, b in zip(after, before, strict=True)]
        rounds.append(one_round(replace(pipeline, layers=costs), layers, measured))
        before = after
    if rank == 0:
        print(json.dumps(report(layers, rounds)))
    dist.destroy_process_group()


def gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * STAGES
    dist.all_gather_object(values, value)
    return values


def layer_costs(repeats: int) -> list[LayerCost]:
    """The costs of all layers, measured by all ranks at once: the median over ranks."""
    dist.barrier()
    own = measure(model(), torch.randn(ROWS, WIDTH), repeats=repeats, clock=time.process_time)
    every = gathered(own)
    return [
        replace(cost, seconds=median(costs[layer].seconds for costs in every))
        for layer, cost in enumerate(own)
    ]


def one_round(
    pipeline: PipelineCosts, layers: dict[str, tuple[int, ...]], measured: dict[str, list[float]]
) -> dict[str, Any]:
    predicted = {name: [s.seconds for s in pipeline.cost(split)] for name, split in layers.items()}
    slowest = {name: times.index(max(times)) for name, times in predicted.items()}
    worst = {name: max(times) for name, times in measured.items()}
    return {
        "errors": {name: max(predicted[name]) / worst[name] - 1 for name in layers},
        "worst": worst,
        "same_stage": all(times.index(max(times)) == slowest[name] for name, times in measured.items()),
    }


def report(layers: dict[str, tuple[int, ...]], rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [entry["errors"] for entry in rounds]
    return {
        "benchmark": "pipeline_split",
        "error": round(median(error["proposed"] for error in errors), 4),
        "uniform_error": round(median(error["uniform"] for error in errors), 4),
        "largest_error": round(max(abs(value) for error in errors for value in error.values()), 4),
        **{name: list(split) for name, split in layers.items()},
        "worst_ms": {name: round(1000 * median(e["worst"][name] for e in rounds), 2) for name in layers},
        "gain": round(median(e["worst"]["uniform"] / e["worst"]["proposed"] for e in rounds), 3),
        "same_stage": sum(entry["same_stage"] for entry in rounds),
        "rounds": len(rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (f"{folder}/rendezvous", options), nprocs=STAGES)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
