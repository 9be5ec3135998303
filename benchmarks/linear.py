"""Measures the speed of an FP8 linear layer with statistics on hardware without FP8.

    python benchmarks/linear.py [--threads N] [--repeats N] [--sizes 256 512 1024 2048] [--without-bf16-units]
                                [--micro-batches N]

Times forward and backward of `size` tokens through a layer of `size` x `size` in BF16 on the CPU, for
`Fp8Linear` with all statistics, torchao's Float8Linear (which emulates FP8 on the CPU), eager and compiled,
and `nn.Linear`. Prints one JSON line per case. Layers take turns. A speed is the median of the ratios of each
round, above 1 if `Fp8Linear` is faster:

    speed_over_torchao, speed_over_torchao_compiled, speed_over_bf16     null without torchao
    fp8_ms, torchao_ms, torchao_compiled_ms, bf16_ms                     medians of forward plus backward

With --without-bf16-units operands are multiplied in float32, as on a CPU without BF16 units. To measure
torch's own BF16 products there as well, also set ONEDNN_MAX_CPU_ISA=AVX2 or AVX512_CORE in the environment.

With --micro-batches N it prints instead, for each size and recipe, the speed of N forward and backward calls
with one quantisation of the weight (`keep_weights`) over that of N separate calls: `speed_over_separate`,
`kept_ms`, `separate_ms`.

torchao has no delayed scaling: DelayedScaling is compared with its dynamic tensorwise recipe, and recipes
with blocks with its rowwise one. With one thread, times are CPU time, so that other processes matter less;
otherwise they are wall-clock time.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import torch
from torch import nn

from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    keep_weights,
    matmul,
    observe,
    set_backend,
)

Run = Callable[[], object]
RECIPES: tuple[tuple[Recipe, str], ...] = (
    (DelayedScaling(), "tensorwise"),
    (CurrentScaling(), "tensorwise"),
    (RowwiseScaling(), "rowwise"),
    # torchao has no layers with blocks for a CPU: its rowwise recipe is the nearest.
    (BlockScaling(), "rowwise"),
    (MXFP8(), "rowwise"),
)


def step(layer: nn.Module, size: int) -> Run:
    """Return a function that runs forward and backward, then discards the gradients."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, size, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(size, size, generator=generator).bfloat16()

    def run() -> None:
        layer(x).backward(grad)
        x.grad = None
        layer.zero_grad()

    return run


def make_linear(size: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(size, size, bias=False, dtype=torch.bfloat16)


def fp8_layer(size: int, recipe: Recipe) -> nn.Module:
    model = nn.Sequential(Fp8Linear.from_linear(make_linear(size), recipe))
    observe(model, StatisticsBuffer())
    return model


def torchao_layer(size: int, recipe_name: str) -> nn.Module | None:
    try:
        # import_module, because torchao may be missing for type checkers.
        config = import_module("torchao.float8.config").Float8LinearConfig.from_recipe_name(recipe_name)
        linear = import_module("torchao.float8.float8_linear").Float8Linear
    except ImportError:
        return None
    layer: nn.Module = linear.from_float(make_linear(size), config=dataclasses.replace(config, emulate=True))
    return layer


def micro_batches(layer: nn.Module, size: int, number: int, *, keep: bool) -> Run:
    """Return a function that runs the micro-batches of one step."""
    run_one = step(layer, size)

    def run() -> None:
        with keep_weights(layer) if keep else nullcontext():
            for _ in range(number):
                run_one()

    return run


def measure_micro_batches(size: int, recipe: Recipe, number: int, repeats: int) -> dict[str, object]:
    runs = {
        "kept": micro_batches(fp8_layer(size, recipe), size, number, keep=True),
        "separate": micro_batches(fp8_layer(size, recipe), size, number, keep=False),
    }
    times = time_in_turn(runs, repeats)
    ratios = [separate / kept for separate, kept in zip(times["separate"], times["kept"], strict=True)]
    case: dict[str, object] = {"size": size, "recipe": recipe.kind, "micro_batches": number}
    case["speed_over_separate"] = round(statistics.median(ratios), 3)
    return case | {f"{name}_ms": round(statistics.median(times[name]), 3) for name in runs}


def time_in_turn(runs: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each call; all runs take turns in every round."""
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(repeats):
        # Rotate the order: the previous measurement affects the caches.
        order.append(order.pop(0))
        for name in order:
            start = clock()
            runs[name]()
            times[name].append(1e3 * (clock() - start))
    return times


def measure_case(size: int, recipe: Recipe, peer_recipe: str, repeats: int) -> dict[str, object]:
    runs = {"fp8": step(fp8_layer(size, recipe), size), "bf16": step(make_linear(size), size)}
    peer, compiled_peer = torchao_layer(size, peer_recipe), torchao_layer(size, peer_recipe)
    if peer is not None and compiled_peer is not None:
        runs["torchao"] = step(peer, size)
        torch.compiler.reset()
        runs["torchao_compiled"] = step(torch.compile(compiled_peer), size)  # type: ignore[arg-type]
    times = time_in_turn(runs, repeats)
    case: dict[str, object] = {"size": size, "recipe": recipe.kind}
    for name in ("torchao", "torchao_compiled", "bf16"):
        ratios = [other / own for other, own in zip(times.get(name, []), times["fp8"], strict=False)]
        case[f"speed_over_{name}"] = round(statistics.median(ratios), 3) if ratios else None
    for name in ("fp8", "torchao", "torchao_compiled", "bf16"):
        case[f"{name}_ms"] = round(statistics.median(times[name]), 3) if name in times else None
    return case


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sizes", nargs="+", type=int, default=[256, 512, 1024, 2048])
    parser.add_argument("--without-bf16-units", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.without_bf16_units:
        # Replace the function in the module whose product calls it.
        vars(matmul)["has_bf16_units"] = lambda: False
    torch.set_num_threads(arguments.threads)
    set_backend("compiled")
    for size in arguments.sizes:
        for recipe, peer_recipe in RECIPES:
            if arguments.micro_batches:
                case = measure_micro_batches(size, recipe, arguments.micro_batches, arguments.repeats)
            else:
                case = measure_case(size, recipe, peer_recipe, arguments.repeats)
            case |= {"threads": arguments.threads, "bf16_units": vars(matmul)["has_bf16_units"]()}
            print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
