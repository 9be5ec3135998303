"""Measures the cost of watching a model, in sampled and in other steps.

    python benchmarks/watching.py [--rounds 8]

Trains a GPT of about 2M parameters on the CPU with one thread and measures the thread's CPU time, so that
other load matters little. Steps of all variants are taken in turn. Prints one JSON line with medians of
ratios for each kind of model: `watched` (steps that are not sampled) and `sampled`, both relative to the
unwatched model, and `share`, the relative cost of sampling one step in 100.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from fp8scope.demo.model import ByteGpt, Shape
from fp8scope.observe.collector import Collector
from fp8scope.observe.tensors import Watching
from fp8scope_kernels import DelayedScaling, convert

SHAPE = Shape(layers=4, width=192, heads=4, context=128)
BATCH = 8
NEVER = 0


class Trainer:
    """A model, its optimizer, and a collector unless `every` is None."""

    def __init__(self, kind: str, every: int | None, *, optimizer: bool = False) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGpt(SHAPE)
        if kind == "fp8":
            convert(self.model, DelayedScaling())
        elif kind == "torchao":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(emulate=True)
            convert_to_float8_training(
                self.model, config=config, module_filter_fn=lambda module, path: "head" not in path
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.text = torch.randint(0, 256, (BATCH, SHAPE.context + 1))
        self.collector = Collector() if every is not None else None
        self.steps = 0
        if self.collector is not None and every is not None:
            self.collector.every = every
            watching = Watching(
                shadow=DelayedScaling() if kind == "shadow" else None, readiness=kind == "readiness"
            )
            self.collector.watch(self.model, self.optimizer if optimizer else None, watching)

    def step(self) -> float:
        """Make one training step and return its CPU time in seconds."""
        began = time.thread_time()
        self.steps += 1
        if self.collector is not None:
            self.collector.begin(self.steps)
        logits = self.model(self.text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), self.text[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.collector is not None:
            self.collector.new_tensors()
            self.collector.snapshot({})
        return time.thread_time() - began


def ratios(make: Callable[[int | None], Trainer], rounds: int) -> dict[str, float]:
    """Return the medians over the rounds; in each round every variant makes one step."""
    plain, watched, sampled = make(None), make(NEVER), make(1)
    relative: dict[str, list[float]] = {"watched": [], "sampled": []}
    for index in range(rounds + 2):
        base, *others = (trainer.step() for trainer in (plain, watched, sampled))
        if index >= 2:
            for name, seconds in zip(relative, others, strict=True):
                relative[name].append(seconds / base)
    medians = {name: statistics.median(values) for name, values in relative.items()}
    medians["share"] = (medians["sampled"] - medians["watched"]) / 100
    return {name: round(value, 4) for name, value in medians.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    kinds = {
        "fp8": lambda every: Trainer("fp8", every),
        "fp8_with_optimizer": lambda every: Trainer("fp8", every, optimizer=True),
        "fp32": lambda every: Trainer("fp32", every),
        "readiness": lambda every: Trainer("readiness", every),
        "shadow": lambda every: Trainer("shadow", every),
        "torchao_tensorwise": lambda every: Trainer("torchao", every),
    }
    results = {name: ratios(make, rounds) for name, make in kinds.items()}
    print(json.dumps({"benchmark": "watching", **results}))


if __name__ == "__main__":
    main()
