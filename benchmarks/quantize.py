"""Measures the cost of the statistics on top of a cast to FP8.

    python benchmarks/quantize.py [--threads N] [--repeats N] [--sizes 2048x1024 8192x4096] [--reference]

Casts BF16 matrices on the CPU with every recipe, on the compiled backend (--reference adds eager torch).
Prints one JSON line per case. The parts of a case are timed in turn, so that other load affects them alike.
Times are medians in milliseconds; ratios are medians of the ratios of each round. With one thread, times are
CPU time, so that other processes matter less; otherwise they are wall-clock time.

    cast_ms, counters_ms    scale chosen and tensor cast; the same with all statistics
    copy_ms, torchao_ms     a plain copy of the same bytes; torchao's compiled cast, null without torchao
    counters_over_cast, cast_over_copy, cast_over_torchao, counters_over_torchao

torchao has no delayed scaling: DelayedScaling is compared with its dynamic cast, which casts the tensor in
the same way. torchao has no cast for the block recipes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    E2M1,
    E4M3,
    MXFP4,
    MXFP8,
    NVFP4,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    ScalingState,
    backends,
    measure,
    quantize,
    quantize_blocks,
    set_backend,
)
from fp8scope_kernels.backends import Backend

Run = Callable[[], object]
DTYPE = torch.float8_e4m3fn
RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(),
    CurrentScaling(),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
    MXFP4(),
    NVFP4(),
)


def cast(x: Tensor, recipe: Recipe, counting: bool) -> Run:
    """Return a function that quantises x as `Fp8Linear` quantises its input."""
    row = torch.zeros(len(STATISTICS), dtype=torch.float64) if counting else None
    block_row = torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64) if counting else None
    grid = recipe.block_of("input")
    if grid is not None:
        format = E4M3 if recipe.fp8_format != "E2M1" else E2M1
        # torch has no dtype for single numbers of four bits.
        dtype = format.dtype or torch.bfloat16
        return lambda: quantize_blocks(x, format, grid, recipe, row, block_row, dtype=dtype)
    state = ScalingState(recipe, E4M3)

    def run() -> object:
        extent = measure(x)
        return quantize(x, state.next_scale(extent.amax), E4M3, row, extent=extent)

    return run


def torchao_cast(x: Tensor, recipe: Recipe) -> Run | None:
    """Return torchao's compiled cast, without statistics; None without torchao or such a recipe."""
    if not isinstance(recipe, DelayedScaling | CurrentScaling | RowwiseScaling):
        return None
    try:
        # import_module, because torchao may be missing for type checkers.
        config = import_module("torchao.float8.config")
        scaling = import_module("torchao.float8.float8_scaling_utils")
        tensors = import_module("torchao.float8.float8_training_tensor")
    except ImportError:
        return None
    rowwise = isinstance(recipe, RowwiseScaling)
    granularity = config.ScalingGranularity.AXISWISE if rowwise else config.ScalingGranularity.TENSORWISE

    def convert(x: Tensor) -> tuple[Tensor, Tensor]:
        result = scaling.hp_tensor_to_float8_dynamic(
            x,
            DTYPE,
            tensors.LinearMMConfig(),
            scaling_granularity=granularity,
            axiswise_dim=-1 if rowwise else None,
        )
        return result._data, result._scale

    compiled = torch.compile(convert)
    return lambda: compiled(x)


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
            run = runs[name]
            start = clock()
            run()
            times[name].append(1e3 * (clock() - start))
    return times


def measure_case(x: Tensor, recipe: Recipe, backend: Backend, repeats: int) -> dict[str, object]:
    set_backend(backend)
    source, target = x.view(torch.uint8), torch.empty_like(x).view(torch.uint8)
    runs: dict[str, Run] = {
        "cast": cast(x, recipe, counting=False),
        "counters": cast(x, recipe, counting=True),
        "copy": lambda: target.copy_(source),
    }
    peer = torchao_cast(x, recipe)
    if peer is not None:
        runs["torchao"] = peer
    times = time_in_turn(runs, repeats)
    if backends.failures():
        sys.exit(f"Building the kernels failed: {backends.failures()}")

    def ratio(over: str, under: str) -> float | None:
        if under not in times:
            return None
        return round(statistics.median(a / b for a, b in zip(times[over], times[under], strict=True)), 3)

    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {
        "recipe": recipe.kind,
        "backend": backend,
        "shape": list(x.shape),
        **{f"{name}_ms": medians.get(name) for name in ("cast", "counters", "copy", "torchao")},
        "counters_over_cast": ratio("counters", "cast"),
        "cast_over_copy": ratio("cast", "copy"),
        "cast_over_torchao": ratio("cast", "torchao"),
        "counters_over_torchao": ratio("counters", "torchao"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sizes", nargs="+", default=["2048x1024", "8192x4096"])
    parser.add_argument("--reference", action="store_true")
    arguments = parser.parse_args()
    choices: list[Backend] = ["compiled", "reference"] if arguments.reference else ["compiled"]
    torch.set_num_threads(arguments.threads)
    for size in arguments.sizes:
        rows, columns = (int(number) for number in size.split("x"))
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
        for recipe in RECIPES:
            for backend in choices:
                case = measure_case(x, recipe, backend, arguments.repeats)
                print(json.dumps({**case, "threads": arguments.threads}), flush=True)


if __name__ == "__main__":
    main()
