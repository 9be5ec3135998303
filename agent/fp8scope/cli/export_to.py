"""`fp8scope export RUN --to TARGET`: a run in the form of another tool."""

import argparse
import sys
from pathlib import Path
from typing import Final

from fp8scope.cli.progress import ProgressLine
from fp8scope.cli.reading.common import REFUSED, WRONG_USE, answered, client_of
from fp8scope.client.plain_text import printable
from fp8scope.exporting.content import ExportError, Progress, RunContent, content_of

PACKAGES: Final = {"parquet": "pyarrow", "mlflow": "mlflow-skinny", "wandb": "wandb"}
TARGETS: Final = ("tensorboard", "wandb", "mlflow", "parquet")
EXPERIMENT: Final = "fp8scope"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that belong to `--to`."""
    parser.add_argument(
        "--to",
        nargs=2,
        metavar=("TARGET", "DESTINATION"),
        help=f"write it for another tool ({', '.join(TARGETS)}) to a folder, or mlflow to a tracking server",
    )
    parser.add_argument(
        "--tensors",
        metavar="PART",
        help="with --to: also the statistics of tensors whose name has PART; '' for all (parquet: all)",
    )
    parser.add_argument(
        "--experiment",
        default=EXPERIMENT,
        help="with --to: the experiment of MLflow, or the project of W&B (%(default)s)",
    )


def export_to(options: argparse.Namespace) -> int:
    """Write a run to the destination; returns the exit status."""
    if options.to[0] not in TARGETS:
        print(
            f"fp8scope export: there is no target {options.to[0][:40]!r}: name {', '.join(TARGETS)}",
            file=sys.stderr,
        )
        return WRONG_USE
    return answered("export", lambda: _exported(options, *options.to))


def _exported(options: argparse.Namespace, target: str, destination: str) -> int:
    client = client_of(options)
    tensors = "" if options.tensors is None and target == "parquet" else options.tensors
    content = content_of(client.run(options.run), tensors)
    line = ProgressLine("exporting", unit="series")
    try:
        written = _write(target, destination, options.experiment, content, line.update)
    except ModuleNotFoundError as error:
        package = PACKAGES.get(target, error.name)
        if target == "mlflow" and error.name != "mlflow":
            # The small package writes to servers only.
            package = "mlflow"
        return _failed(f"--to {target} needs {error.name}, which is missing: pip install {package}")
    except (ExportError, OSError) as error:
        return _failed(printable(error))
    finally:
        line.end()
    print(written)
    return 0


def _write(target: str, destination: str, experiment: str, content: RunContent, progress: Progress) -> str:
    """Write with the module of the target, which may need a package; returns what to do next."""
    folder = Path(destination)
    if target == "tensorboard":
        from fp8scope.exporting import tensorboard

        return f"{tensorboard.write(content, folder, progress)}\ntensorboard --logdir {folder}"
    if target == "parquet":
        from fp8scope.exporting import parquet_files

        return "\n".join(map(str, parquet_files.write(content, folder, progress)))
    if target == "wandb":
        from fp8scope.exporting import wandb_folder

        return f"wandb sync {wandb_folder.write(content, folder, experiment, progress)}"
    from fp8scope.exporting import mlflow_run

    run = mlflow_run.write(content, destination, experiment, progress)
    return f"MLflow's run {run} of the experiment {experiment}"


def _failed(message: str) -> int:
    print(f"fp8scope export: {message}", file=sys.stderr)
    return REFUSED
