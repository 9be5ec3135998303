"""`fp8scope evaluate --matrix`: checkpoints in several precisions, judged by the server.

The script is imported, not run. It has the evaluation function, and a function that loads a checkpoint. Every
checkpoint is one matrix, at its own step of one run. The agent measures; the server has the statistics, and
the command reads its verdicts back.
"""

import argparse
import importlib.util
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import fp8scope
from fp8scope.cli.progress import ProgressLine
from fp8scope.cli.server import server_settings
from fp8scope.config import ConfigurationError
from fp8scope.delivery.transport import NextAction, Transport
from fp8scope.evaluation.columns import PRECISIONS, REFERENCE
from fp8scope.evaluation.matrix import EvaluationMatrix, evaluate_matrix
from fp8scope.evaluation.scores import EvaluationError
from fp8scope.guard import configure_logging
from fp8scope.run import Run

LOADER = "load_model"
FINISH_SECONDS = 120.0


class UsageError(Exception):
    """The script, its functions or a checkpoint cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Functions:
    """The functions of the user's script."""

    evaluate: Callable[[Any], Any]
    load: Callable[[str], Any]


def main(arguments: Sequence[str]) -> int:
    """Evaluate checkpoints in several precisions; returns the exit status."""
    options = _parser().parse_args(list(arguments))
    configure_logging()
    try:
        functions = load_functions(options.matrix, options.load)
        missing = [path for path in options.checkpoints if not Path(path).exists()]
        if missing:
            raise UsageError(f"there is no checkpoint {missing[0]}.")
        if options.step is not None and len(options.checkpoints) > 1:
            raise UsageError("--step is for a single checkpoint; let the loader return (model, step).")
        run = fp8scope.init(
            project=options.project,
            name=options.name or f"evaluation of {Path(options.checkpoints[0]).name}",
            config={"checkpoints": list(options.checkpoints), "evaluation": options.matrix},
            resume=options.run,
            commands=(),
            console="off",
        )
    except (UsageError, ConfigurationError) as error:
        print(f"fp8scope evaluate: {error}", file=sys.stderr)
        return 2
    matrices, failed = [], False
    try:
        for path in options.checkpoints:
            matrix = _measured(functions, path, run, options)
            failed = failed or matrix is None or bool(matrix.errors)
            if matrix is not None:
                matrices.append((path, matrix))
    finally:
        report = run.finish(FINISH_SECONDS)
    is_sent = report.complete and bool(run.url)
    for path, matrix in matrices:
        verdicts = _verdicts(run, matrix.step, options.project) if is_sent else {}
        _show(path, matrix, verdicts, as_json=options.json)
    if not is_sent and matrices:
        print(
            "fp8scope evaluate: no verdicts, because the server does not have the results yet: "
            "`fp8scope sync` sends them.",
            file=sys.stderr,
        )
    elif is_sent and not options.json:
        print(f"\n{run.url}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope evaluate",
        description="Evaluate checkpoints in BF16, FP8, FP6, INT8, INT4 and NVFP4 with your own function.",
        usage="fp8scope evaluate --matrix SCRIPT:FUNCTION [OPTIONS] CHECKPOINT [CHECKPOINT ...]",
        epilog="docs/evaluations.md says what the functions do.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--matrix",
        required=True,
        metavar="SCRIPT:FUNCTION",
        help="the Python file and its function, which returns the score of every item of a model",
    )
    parser.add_argument(
        "--load",
        default=LOADER,
        metavar="FUNCTION",
        help="the script's function that returns the model, or (model, step), of a checkpoint's path "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--precisions",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        metavar="NAME,...",
        help=f"default: all that the model can have of {', '.join(PRECISIONS)}",
    )
    parser.add_argument("--task", default="evaluation", help="the name of the task (default: %(default)s)")
    parser.add_argument("--metric", default="score", help="the name of the score (default: %(default)s)")
    parser.add_argument("--lower-is-better", action="store_true", help="as for a loss")
    parser.add_argument(
        "--margin", type=float, help="the largest difference of the score that counts as none"
    )
    parser.add_argument("--include", action="append", metavar="PATTERN", help="quantise these layers only")
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help="quantise all but these layers")
    parser.add_argument(
        "--step",
        type=int,
        help="the checkpoint's step (default: from the loader, else the last number in the file's name)",
    )
    parser.add_argument("--run", help="the id of the run to add the matrix to (default: a new run)")
    parser.add_argument("--project", help="the project whose login to use")
    parser.add_argument("--name", help="the name of the new run (default: that of the checkpoint)")
    parser.add_argument("--json", action="store_true", help="print each cell as a line of JSON")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="files or folders")
    return parser


def load_functions(target: str, loader: str) -> Functions:
    """Import the script of SCRIPT:FUNCTION. Raises UsageError if it, or a function of it, cannot be used."""
    path, _, name = target.rpartition(":")
    if not path or not name.isidentifier():
        raise UsageError(f"--matrix takes SCRIPT:FUNCTION, such as evaluate.py:evaluate, got {target!r}.")
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no script {path}.")
    module = _imported(file)
    return Functions(
        _function(module, name, path, "evaluate(model)"), _function(module, loader, path, LOADER)
    )


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    # As for a script that is run: it finds its neighbours.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _function(module: ModuleType, name: str, path: str, what: str) -> Callable[[Any], Any]:
    function = getattr(module, name, None)
    if not callable(function):
        example = (
            f"def {LOADER}(path):  # returns the model, or (model, step)"
            if what == LOADER
            else f"def {name}(model):  # returns the score of every item"
        )
        raise UsageError(f"{path} has no function {name}. It needs one:\n    {example}")
    loaded: Callable[[Any], Any] = function
    return loaded


def _measured(
    functions: Functions, path: str, run: Any, options: argparse.Namespace
) -> EvaluationMatrix | None:
    """The matrix of one checkpoint; None, with a message, if it has none."""
    line = ProgressLine("evaluating", unit="precisions")
    try:
        model, step = _loaded(functions, path, options.step)
        matrix = evaluate_matrix(
            model,
            functions.evaluate,
            precisions=options.precisions,
            name=options.task,
            metric=options.metric,
            higher_is_better=not options.lower_is_better,
            margin=options.margin,
            include=options.include,
            exclude=options.exclude,
            step=step,
            run=run if isinstance(run, Run) else None,
            on_progress=line.update,
        )
    except (EvaluationError, UsageError, ValueError) as error:
        print(f"fp8scope evaluate: {path}: {error}", file=sys.stderr)
        if error.__cause__ is not None and not isinstance(error.__cause__, EvaluationError):
            traceback.print_exception(error.__cause__)
        return None
    finally:
        line.end()
    return matrix


def _loaded(functions: Functions, path: str, step: int | None) -> tuple[nn.Module, int]:
    try:
        loaded = functions.load(path)
    except Exception as error:
        raise UsageError(f"it cannot be loaded: {type(error).__name__}: {error}") from error
    model, own = loaded if isinstance(loaded, tuple) and len(loaded) == 2 else (loaded, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the loader returned {type(model).__name__}; it must return a torch.nn.Module.")
    if step is not None:
        return model, step
    numbers = re.findall(r"\d+", Path(path).stem)
    return model, int(own if own is not None else numbers[-1] if numbers else 0)


Verdicts = Mapping[tuple[str, str, str], Mapping[str, Any]]


def _verdicts(run: Any, step: int, project: str | None) -> Verdicts:
    """The server's judgement of each cell by task, metric and precision; empty, with a message, without."""
    transport = Transport(server_settings(None, project))
    try:
        outcome = transport.send("GET", f"/runs/{run.id}/evaluation_matrix?step={step}", b"")
    finally:
        transport.close()
    if outcome.action is not NextAction.DONE:
        why = outcome.message or outcome.code or f"HTTP {outcome.status}"
        print(f"fp8scope evaluate: the server gave no verdicts: {why}", file=sys.stderr)
        return {}
    return {
        (task["name"], task["metric"], precision): cell
        for task in outcome.answer.get("tasks", ())
        for precision, cell in task["cells"].items()
    }


def _show(path: str, matrix: EvaluationMatrix, verdicts: Verdicts, *, as_json: bool) -> None:
    if as_json:
        for cell in cells(path, matrix, verdicts):
            print(json.dumps(cell))
        return
    print(f"\n{path}, step {matrix.step:,}\n{matrix}")
    judged = [(key, verdict_text(cell)) for key, cell in verdicts.items() if key[2] != REFERENCE]
    if judged:
        print("\nVerdicts, each against BF16:")
    for (name, metric, precision), text in judged:
        print(f"  {precision:<12} {name} {metric}: {text}")


def verdict_text(cell: Mapping[str, Any]) -> str:
    """The verdict, its interval and its margin."""
    interval = cell.get("difference_interval")
    verdict = str(cell.get("verdict", "")).replace("_", " ")
    if not interval:
        return f"{verdict}. {cell.get('explanation', '')}"
    level = 100.0 * float(cell.get("interval_level") or 0.0)
    return (
        f"{verdict}, difference {cell['difference']:+.4g}, {level:.4g} % interval {interval[0]:+.4g} to "
        f"{interval[1]:+.4g}, margin {cell['margin']:.3g}"
    )


def cells(path: str, matrix: EvaluationMatrix, verdicts: Verdicts) -> Iterator[dict[str, Any]]:
    """Every cell of a matrix as JSON; a precision that failed is one cell with its error."""
    for column in matrix.columns:
        facts = {
            "checkpoint": path,
            "step": matrix.step,
            "precision": column.precision,
            "weight_bytes": column.weight_bytes,
            "model_bytes": column.model_bytes,
            "seconds": column.seconds,
        }
        if column.error:
            yield {**facts, "error": column.error}
        for task, result in column.scores.items():
            cell = {**facts, "task": task, "metric": result.metric, "score": result.mean}
            if column.precision != REFERENCE:
                difference = matrix.difference(task, column.precision)
                judged = dict(verdicts.get((task, result.metric, column.precision), {}))
                cell |= {
                    "difference": difference.mean,
                    "standard_error": None if math.isnan(difference.error) else difference.error,
                    "interval": judged.get("difference_interval"),
                    "margin": judged.get("margin"),
                    "verdict": judged.get("verdict"),
                }
            yield {**cell, "items": len(result.items)}
