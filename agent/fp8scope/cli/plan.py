"""`fp8scope plan`: split a pipeline by measured costs, and predict the time of a step by its transfers."""

import argparse
import json
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8scope.cli.server import server_settings
from fp8scope.config import ConfigurationError
from fp8scope.planning.pipeline_split import (
    AIMS,
    PipelineSplit,
    SplitError,
    best_split,
    pipeline_from,
    split_of,
    uniform_split,
)
from fp8scope.planning.step_times import (
    ClusterRates,
    ModelShape,
    ParallelPlan,
    PlanError,
    compare_with_steps,
    step_times,
)
from fp8scope.postmortem.sources import RunSource, SourceError

GB = 1e9
STEP_SECONDS = "step_seconds"
PLAN_EXAMPLE = """\
PLAN is a JSON file:
  {"shape": {"layers": 84, "hidden": 8192, "sequence": 4096, "vocabulary": 135040, "architecture": "lfa"},
   "plan": {"pipeline": 32, "tensor": 1, "data": 3, "accumulation": 384, "optimizer_parallel": true},
   "cluster": {"flops": 171.6e12, "link": 85e9, "network": 24.375e9, "connectors": 2}}
Rates are flop/s and bytes/s: `link` is one direction inside of a node, `network` one connector of a node."""
COSTS_EXAMPLE = """\
COSTS is a JSON file; `seconds` are those of one micro-batch, `weights` and `activations` are bytes:
  {"layers": [{"name": "0", "seconds": 0.011, "weights": 6e9, "activations": 2e9}, ...],
   "first": {"weights": 12e9}, "last": {"seconds": 0.02, "weights": 12e9}, "micro_batches": 64}"""


def plan(arguments: list[str]) -> int:
    """Split a pipeline by measured costs, or predict a step's time by its transfers."""
    parser = argparse.ArgumentParser(prog="fp8scope plan", description=plan.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    split = _command(commands, "split", COSTS_EXAMPLE, "propose the split whose worst stage is best")
    split.add_argument("costs", type=Path, metavar="COSTS")
    split.add_argument("--stages", type=int, required=True)
    split.add_argument(
        "--first", choices=AIMS, default="time", help="what to make least first (default: time)"
    )
    split.add_argument("--memory-limit", type=float, metavar="GB", help="no stage may need more")
    split.add_argument(
        "--against", type=_layers, metavar="3,3,…", help="the split to compare with (default: uniform)"
    )
    split.set_defaults(function=_split)
    step = _command(commands, "step", PLAN_EXAMPLE, "predict the time of a step by its parts")
    step.add_argument("plan", type=Path, metavar="PLAN")
    step.add_argument("--run", type=uuid.UUID, help="compare with the measured steps of this run")
    step.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    step.add_argument("--project", help="the project whose login to use")
    step.set_defaults(function=_step)
    options = parser.parse_args(arguments)
    try:
        document = options.function(options)
    except (ConfigurationError, SourceError, SplitError, PlanError, OSError) as error:
        print(f"fp8scope plan: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(document))
    return 0


def _command(commands: Any, name: str, example: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary.capitalize() + ".",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _layers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise PlanError(f"{path} is no JSON: {error}") from None


def _split(options: argparse.Namespace) -> Any:
    pipeline = pipeline_from(_read(options.costs), options.stages)
    limit = None if options.memory_limit is None else options.memory_limit * GB
    best = best_split(pipeline, options.first, limit)
    other = split_of(pipeline, options.against) if options.against else uniform_split(pipeline)
    if not options.json:
        print(f"{'stage':>5} {'layers':>6} {'in flight':>9} {'seconds':>10} {'GB':>8}   {'before':>24}")
        for number, (stage, before) in enumerate(zip(best.stages, other.stages, strict=True)):
            then = f"{before.layers} layers, {before.seconds:.4g} s, {before.memory / GB:.3g} GB"
            print(
                f"{number:>5} {stage.layers:>6} {stage.in_flight:>9} {stage.seconds:>10.4g} "
                f"{stage.memory / GB:>8.3g}   {then:>24}"
            )
        print(
            f"worst stage: {other.seconds:.4g} s -> {best.seconds:.4g} s, "
            f"{other.memory / GB:.3g} GB -> {best.memory / GB:.3g} GB; split {list(best.layers)}"
        )
    return {"proposed": _document(best), "before": _document(other)}


def _document(split: PipelineSplit) -> dict[str, Any]:
    return {
        "layers": list(split.layers),
        "seconds": split.seconds,
        "memory": split.memory,
        "stages": [asdict(stage) for stage in split.stages],
    }


def _step(options: argparse.Namespace) -> Any:
    document = _read(options.plan)
    shape, plan_, cluster = (
        _part(document, name, kind)
        for name, kind in (("shape", ModelShape), ("plan", ParallelPlan), ("cluster", ClusterRates))
    )
    times = step_times(shape, plan_, cluster)
    result: dict[str, Any] = {**asdict(times), "total": times.total}
    if not options.json:
        for name, seconds in result.items():
            print(f"{name:<10} {seconds:>10.3f} s {seconds / times.total:>7.1%}")
    if options.run is not None:
        source = RunSource(server_settings(options.url, options.project), str(options.run))
        comparison = compare_with_steps(shape, plan_, cluster, source.scalar(STEP_SECONDS))
        result |= asdict(comparison)
        if not options.json:
            rate = "no rate" if comparison.flops is None else f"{comparison.flops:.4g} flop/s"
            print(f"measured   {comparison.measured:>10.3f} s; the model is off by {comparison.error:+.1%}.")
            print(f"{rate} of one device would explain the measured steps.")
    return result


def _part(document: Any, name: str, kind: type[Any]) -> Any:
    part = document.get(name) if isinstance(document, Mapping) else None
    if not isinstance(part, Mapping):
        raise PlanError(f"The document needs an object `{name}`.")
    try:
        return kind(**part)
    except TypeError as error:
        raise PlanError(f"{name}: {str(error).partition('()')[2].strip() or error}") from None
