"""Measures stochastic rounding, and histograms of exponents, in casts to nearest.

    python benchmarks/random_rounding.py [--size 2048x1024] [--repeats N]

Casts a BF16 matrix to E5M2 with counters, one thread on the CPU. Prints one JSON line: medians of the CPU
times over those of the cast to nearest, in turns.

    stream_over_cast     at random, by a stream of its own (compiled kernels)
    torch_over_cast      at random, by a generator of torch (eager torch)
    histogram_over_cast  `exponent_histogram`
    eager_histogram_over_cast  the same in eager torch
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from fp8scope_kernels import (
    E5M2,
    STATISTICS,
    RandomStream,
    exponent_histogram,
    measure,
    quantize,
    set_backend,
)


def seconds(run: Callable[[], object]) -> float:
    before = time.thread_time()
    run()
    return time.thread_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="2048x1024")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    rows, columns = (int(number) for number in options.size.split("x"))
    torch.set_num_threads(1)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    row, scale, extent = torch.zeros(len(STATISTICS), dtype=torch.float64), torch.tensor(1e4), measure(x)
    stream, generator = RandomStream(1), torch.Generator().manual_seed(1)

    def eager_histogram() -> None:
        set_backend("reference")
        exponent_histogram(x)
        set_backend("auto")

    cases: dict[str, Callable[[], object]] = {
        "cast": lambda: quantize(x, scale, E5M2, row, extent=extent),
        "stream": lambda: quantize(x, scale, E5M2, row, extent=extent, stochastic=stream),
        "torch": lambda: quantize(x, scale, E5M2, row, extent=extent, stochastic=generator),
        "histogram": lambda: exponent_histogram(x),
        "eager_histogram": eager_histogram,
    }
    for run in cases.values():
        run()
    rounds = [{name: seconds(run) for name, run in cases.items()} for _ in range(options.repeats)]
    ratios = {
        f"{name}_over_cast": round(statistics.median(times[name] / times["cast"] for times in rounds), 2)
        for name in cases
        if name != "cast"
    }
    print(json.dumps({"benchmark": "random_rounding", "size": options.size, **ratios}))


if __name__ == "__main__":
    main()
