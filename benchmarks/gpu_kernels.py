"""Measures, on a CUDA device, the cost of the statistics and the speed of FP8 relative to BF16.

    python benchmarks/gpu_kernels.py [--repeats N] [--elements 67108864 ...] [--sizes 512 ... 8192]

Prints one JSON line per case, or a single line if there is no CUDA device. Times are medians in milliseconds,
measured with CUDA events; the parts of a case are timed in turn.

`"case": "cast"` casts a BF16 matrix to E4M3 with a given scale, as delayed scaling does:

    cast_ms, amax_ms, counters_ms   the cast; with amax in the same pass; with all statistics
    transpose_ms                    all statistics, and the transpose written as well
    copy_ms, torchao_ms             a copy of the matrix; torchao's compiled cast including amax, or null
    bandwidth_over_copy             bytes per second of `counters` (2 read, 1 written) over those of the copy
    counters_over_amax              `counters` over `amax`: the cost of counting

`"case": "linear"` times forward and backward with `size` tokens, inputs and outputs, including quantisation
and statistics: `fp8_ms`, `bf16_ms`, `torchao_ms`, `transformer_engine_ms` (null if not installed), and
`fp8_over_...`, the speed relative to each. `counted_over_uncounted` is the time with statistics over that
without; `on_units` has the products that ran on FP8 units. `"case": "break_even"` has the smallest size from
which FP8 is faster than BF16.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module

import torch
from torch import Tensor, nn

from fp8scope_kernels import (
    E4M3,
    MXFP8,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    fp8_layers,
    observe,
    set_backend,
)
from fp8scope_kernels.triton import backend as triton_backend

Run = Callable[[], object]
Line = dict[str, object]


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_in_turn(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Return the median device time of each run in milliseconds; all runs take turns in every round."""
    for run in runs.values():
        for _ in range(5):
            run()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start, end = event(), event()
            start.record()
            run()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs)
        for name, pairs in events.items()
    }


def rounded(times: dict[str, float], *names: str) -> dict[str, float | None]:
    return {f"{name}_ms": round(times[name], 4) if name in times else None for name in names}


def ratio(times: dict[str, float], over: str, under: str) -> float | None:
    return round(times[over] / times[under], 3) if over in times and under in times else None


def cast_case(elements: int, repeats: int) -> Line:
    x = torch.randn(elements // 8192, 8192, device="cuda").bfloat16()
    target, scale = torch.empty_like(x), torch.tensor(64.0, device="cuda")
    row = torch.zeros(len(STATISTICS), dtype=torch.float64, device="cuda")

    def cast(*, measure: bool = False, count: bool = False, transpose: bool = False) -> Run:
        counted = row if count else None
        return lambda: triton_backend.quantize(
            torch.float8_e4m3fn, x, scale, E4M3, counted, measure=measure, transpose=transpose
        )

    runs: dict[str, Run] = {
        "copy": lambda: target.copy_(x),
        "cast": cast(),
        "amax": cast(measure=True),
        "counters": cast(measure=True, count=True),
        "transpose": cast(measure=True, count=True, transpose=True),
    }
    peer = torchao_cast(x)
    if peer is not None:
        runs["torchao"] = peer
    times = time_in_turn(runs, repeats)
    copied, read_and_written = 4 / times["copy"], 3 / times["counters"]
    return {
        "case": "cast",
        "elements": x.numel(),
        **rounded(times, "copy", "cast", "amax", "counters", "transpose", "torchao"),
        "copy_gb_per_s": round(4e-6 * x.numel() / times["copy"], 1),
        "bandwidth_over_copy": round(read_and_written / copied, 3),
        "counters_over_amax": ratio(times, "counters", "amax"),
        "counters_over_torchao": ratio(times, "counters", "torchao"),
    }


def torchao_cast(x: Tensor) -> Run | None:
    """Return torchao's compiled cast, without statistics; None without torchao."""
    try:
        # import_module, because torchao may be missing for type checkers.
        scaling = import_module("torchao.float8.float8_scaling_utils")
        tensors = import_module("torchao.float8.float8_training_tensor")
    except ImportError:
        return None

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        result = scaling.hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, tensors.LinearMMConfig())
        return result._data, result._scale

    compiled = torch.compile(cast)
    return lambda: compiled(x)


def layer(size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16))


def fp8_layer(size: int, recipe: Recipe, *, counted: bool = True) -> nn.Module:
    model = layer(size)
    convert(model, recipe, exclude=())
    if counted:
        observe(model, StatisticsBuffer(device="cuda"))
    return model


def torchao_layer(size: int) -> nn.Module | None:
    try:
        float8 = import_module("torchao.float8")
    except ImportError:
        return None
    model: nn.Module = float8.convert_to_float8_training(layer(size))
    model.compile()
    return model


def transformer_engine_layer(size: int) -> tuple[nn.Module, Callable[[], object]] | None:
    """Return Transformer Engine's layer and the context in which it computes in FP8; None without it."""
    try:
        engine = import_module("transformer_engine.pytorch")
        recipe = import_module("transformer_engine.common.recipe")
    except ImportError:
        return None
    model: nn.Module = engine.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device="cuda")
    return model, lambda: engine.fp8_autocast(enabled=True, fp8_recipe=recipe.DelayedScaling())


def training_step(
    model: nn.Module, x: Tensor, gradient: Tensor, context: Callable[[], object] | None = None
) -> Run:
    def run() -> None:
        if context is None:
            output = model(x)
        else:
            with context():  # type: ignore[attr-defined]
                output = model(x)
        output.backward(gradient)
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None

    return run


def linear_case(size: int, recipe: Recipe, repeats: int) -> Line:
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(size, size, device="cuda", dtype=torch.bfloat16) * 1e-3
    model = fp8_layer(size, recipe)
    runs = {
        "bf16": training_step(layer(size), x, gradient),
        "fp8": training_step(model, x, gradient),
        "uncounted": training_step(fp8_layer(size, recipe, counted=False), x, gradient),
    }
    peer = torchao_layer(size)
    if peer is not None:
        runs["torchao"] = training_step(peer, x, gradient)
    engine = transformer_engine_layer(size)
    if engine is not None:
        runs["transformer_engine"] = training_step(engine[0], x, gradient, engine[1])
    times = time_in_turn(runs, repeats)
    return {
        "case": "linear",
        "recipe": recipe.kind,
        "size": size,
        **rounded(times, "fp8", "bf16", "torchao", "transformer_engine"),
        **{
            f"fp8_over_{name}": ratio(times, name, "fp8")
            for name in ("bf16", "torchao", "transformer_engine")
        },
        "counted_over_uncounted": ratio(times, "fp8", "uncounted"),
        "on_units": [name for _, fp8 in fp8_layers(model) for name, ran in fp8.on_units.items() if ran],
    }


def break_even(lines: list[Line]) -> int | None:
    """Return the smallest size from which FP8 is faster at every size; None if it is not at the largest."""
    smallest = None
    for line in sorted(lines, key=lambda line: -int(str(line["size"]))):
        if float(str(line["fp8_over_bf16"])) < 1:
            break
        smallest = int(str(line["size"]))
    return smallest


def measure_all(elements: list[int], sizes: list[int], repeats: int) -> Iterator[Line]:
    for number in elements:
        yield cast_case(number, repeats)
    for recipe in (DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8()):
        lines = []
        for size in sizes:
            lines.append(linear_case(size, recipe, repeats))
            yield lines[-1]
        yield {"case": "break_even", "recipe": recipe.kind, "size": break_even(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--elements", type=int, nargs="+", default=[2**26, 2**28])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"case": "none", "skipped": "there is no CUDA device"}))
        return
    set_backend("triton")
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    for line in measure_all(arguments.elements, arguments.sizes, arguments.repeats):
        print(json.dumps({**line, **about}), flush=True)


if __name__ == "__main__":
    main()
