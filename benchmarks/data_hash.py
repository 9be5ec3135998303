"""Measures the cost of hashing a batch, and its share of a training step.

    python benchmarks/data_hash.py [--repeat 200]

Prints one JSON line for each batch: `microseconds` is the median time in which the training thread adds the
batch to a step's hash, without waiting for a device; `step_ratio` is that time over the time of a step on the
batch, for token ids, of a GPT of 2M parameters, far fewer than in practice, with a context of 128. With
CUDA, batches and model are on the device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.demo.model import ByteGpt, Shape
from fp8scope.guard import Guard
from fp8scope.observe.batch_hash import BatchHasher

SHAPE = Shape(layers=4, width=192, heads=4, context=128)
STEPS = 3


class Logged:
    """Stands for the open step: takes the hash."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.device_scalars: dict[str, Tensor] = {}

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Keep nothing."""


def batches(device: str) -> Iterator[tuple[str, Tensor]]:
    for rows, length in ((4, 256), (8, 1024), (8, 4096)):
        yield f"tokens {rows} x {length}", torch.randint(0, 256, (rows, length), device=device)
    yield "images 32 x 3 x 224 x 224", torch.randn(32, 3, 224, 224, device=device)


def median_seconds(work: Callable[[], object], repeat: int, device: str) -> float:
    seconds = []
    for _ in range(repeat):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def step_seconds(tokens: Tensor, device: str) -> float:
    """The time of one training step on these tokens, cut into sequences of the model's context."""
    model: nn.Module = ByteGpt(SHAPE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = tokens.reshape(-1, SHAPE.context)

    def step() -> None:
        model(inputs).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    return median_seconds(step, STEPS, device)


def main() -> None:
    """Print one line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=200)
    repeat = parser.parse_args().repeat
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hasher = BatchHasher(Guard())
    for name, batch in batches(device):

        def add(batch: Tensor = batch) -> None:
            hasher.add(Logged(), (batch,))

        add()
        seconds = median_seconds(add, repeat, device)
        line: dict[str, Any] = {"device": device, "batch": name, "microseconds": round(seconds * 1e6, 1)}
        if not batch.is_floating_point():
            line["step_ratio"] = float(f"{seconds / step_seconds(batch, device):.2g}")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
