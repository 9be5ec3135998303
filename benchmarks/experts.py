"""Measures experts in FP8 against the same module in BF16, which multiplies by torch's grouped product.

    python benchmarks/experts.py [--repeats 10] [--tokens 2048] [--width 512] [--hidden 1024] [--experts 8 64]

Times forward and backward of tokens that are sorted by expert, in equal numbers, on one thread, by CPU time.
Modules take turns; ratios are medians of the rounds. Prints one JSON line for each number of experts and
recipe:

    over_bf16         time in FP8 without counters, in times of BF16
    over_linear       the same in times of one `Fp8Linear` for each expert, called in a loop
    counters          time with rows for each expert and layer, in times of that without counters
    layer_counters    time with rows for each layer only, likewise
    bf16_ms           of forward and backward
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    observe,
)

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(),
    CurrentScaling(),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
)
Run = Callable[[], object]


class GroupedExperts(nn.Module):
    """Experts as torchtitan writes them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1 = nn.Parameter(torch.randn(experts, hidden, width).bfloat16() / width**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden).bfloat16() / hidden**0.5)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, width).bfloat16() / width**0.5)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        gate = functional.silu(functional.grouped_mm(x, self.w1.mT, offs=offsets))
        up = functional.grouped_mm(x, self.w3.mT, offs=offsets)
        return functional.grouped_mm(gate * up, self.w2.mT, offs=offsets)


class LinearExperts(nn.Module):
    """The same of one layer for each expert and weight, in a loop."""

    def __init__(self, experts: int, width: int, hidden: int, recipe: Recipe) -> None:
        super().__init__()

        def layers(inputs: int, outputs: int) -> nn.ModuleList:
            made = (
                Fp8Linear(inputs, outputs, False, dtype=torch.bfloat16, recipe=recipe) for _ in range(experts)
            )
            return nn.ModuleList(made)

        self.w1, self.w2, self.w3 = layers(width, hidden), layers(hidden, width), layers(width, hidden)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        ends = offsets.tolist()
        parts: list[Any] = [x[start:end] for start, end in zip((0, *ends), ends, strict=False)]
        return torch.cat(
            [
                w2(functional.silu(w1(part)) * w3(part))
                for part, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3, strict=True)
            ]
        )


def step(module: nn.Module, tokens: int, width: int, experts: int) -> Run:
    """A function that runs forward and backward, and discards the gradients."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(tokens, width, generator=generator).bfloat16()
    offsets = torch.arange(1, experts + 1, dtype=torch.int32) * (tokens // experts)

    def run() -> None:
        module(x, offsets).backward(grad)
        x.grad = None
        module.zero_grad()

    return run


def times_of(runs: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """The CPU seconds of each call; all take turns in every round."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(repeats):
        order.append(order.pop(0))
        for name in order:
            began = time.thread_time()
            runs[name]()
            times[name].append(time.thread_time() - began)
    return times


def measure(arguments: argparse.Namespace, experts: int, recipe: Recipe) -> dict[str, object]:
    width, hidden = arguments.width, arguments.hidden
    tokens = arguments.tokens - arguments.tokens % experts
    modules: dict[str, nn.Module] = {"bf16": GroupedExperts(experts, width, hidden)}
    for name, limit in (("fp8", None), ("counters", 1 << 20), ("layer_counters", 0)):
        modules[name] = GroupedExperts(experts, width, hidden)
        convert(modules[name], recipe)
        if limit is not None:
            observe(modules[name], StatisticsBuffer(), expert_tensors=limit)
    modules["linear"] = LinearExperts(experts, width, hidden, recipe)
    runs = {name: step(module, tokens, width, experts) for name, module in modules.items()}
    times = times_of(runs, arguments.repeats)

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[name], times[other], strict=True)), 3)

    return {
        "benchmark": "experts",
        "experts": experts,
        "recipe": recipe.kind,
        "over_bf16": ratio("fp8", "bf16"),
        "over_linear": ratio("fp8", "linear"),
        "counters": ratio("counters", "fp8"),
        "layer_counters": ratio("layer_counters", "fp8"),
        "bf16_ms": round(1e3 * statistics.median(times["bf16"]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", nargs="+", type=int, default=[8, 64])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for experts in arguments.experts:
        for recipe in RECIPES:
            print(json.dumps(measure(arguments, experts, recipe)), flush=True)


if __name__ == "__main__":
    main()
