"""Measures how much slower eager torch is than the compiled kernels on a CPU.

    python benchmarks/eager_fallback.py [--repeats N]

Quantises a BF16 matrix of 2048x1024 to E4M3 with one thread: casts, casts with counters, and samples
(quantisation error and exponents). Prints one JSON line per recipe with ratios of CPU time, eager torch over
compiled kernels. Both take turns; ratios are medians over the rounds. Samples do not depend on the recipe.

    cast_ratio, counters_ratio, sample_ratio
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from quantize import RECIPES, cast

from fp8scope_kernels import E4M3, SAMPLE_SIZE, accumulate_sample, quantize_values, set_backend


def ratio(run: Callable[[], object], repeats: int) -> float:
    """Return the ratio of CPU time, eager torch over compiled kernels."""
    rounds = []
    for _ in range(repeats):
        set_backend("compiled")
        begin = time.thread_time()
        run()
        middle = time.thread_time()
        set_backend("reference")
        again = time.thread_time()
        run()
        rounds.append((time.thread_time() - again) / (middle - begin))
    return round(statistics.median(rounds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    repeats: int = parser.parse_args().repeats
    torch.set_num_threads(1)
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = torch.tensor(100.0)
    values, sample = quantize_values(x, scale, E4M3), torch.zeros(SAMPLE_SIZE, dtype=torch.float64)
    sample_ratio = ratio(lambda: accumulate_sample(sample, x, values, scale.reciprocal()), repeats)
    for recipe in RECIPES:
        line = {
            "recipe": type(recipe).__name__,
            "cast_ratio": ratio(cast(x, recipe, counting=False), repeats),
            "counters_ratio": ratio(cast(x, recipe, counting=True), repeats),
            "sample_ratio": sample_ratio,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
