"""The fp8scope agent: the public API for training scripts.

>>> import fp8scope
>>> run = fp8scope.init(name="gpt fp8", mode="disabled")
>>> with run.step(tokens=4096) as step:
...     step.log(loss=2.3)
>>> run.finish().complete
True

Importing this package is cheap: torch is imported when a model is converted or watched, NumPy and Arrow when
a run begins.
"""

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fp8scope.config import ConfigurationError

if TYPE_CHECKING:
    import torch

    from fp8scope.client import Client, ClientError
    from fp8scope.config import Settings
    from fp8scope.control.command_queue import Command
    from fp8scope.delivery.inbox import Alert
    from fp8scope.evaluation.matrix import evaluate_matrix
    from fp8scope.evaluation.scores import EvaluationError, ItemScores
    from fp8scope.observe.batch_hash import data_hash
    from fp8scope.observe.budget import Overhead
    from fp8scope.recording.finish_report import FinishReport
    from fp8scope.run import Run
    from fp8scope.step import Step
    from fp8scope_kernels import (
        MXFP4,
        MXFP8,
        NVFP4,
        BlockScaling,
        CurrentScaling,
        DelayedScaling,
        Recipe,
        RowwiseScaling,
        convert,
    )
    from fp8scope_kernels.convert import Selection

    __version__: str

__all__ = [
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Alert",
    "BlockScaling",
    "Client",
    "ClientError",
    "Command",
    "ConfigurationError",
    "CurrentScaling",
    "DelayedScaling",
    "EvaluationError",
    "FinishReport",
    "ItemScores",
    "RowwiseScaling",
    "Run",
    "Step",
    "attach",
    "convert",
    "data_hash",
    "evaluate_matrix",
    "finish",
    "init",
    "log",
    "watch",
]

_KERNELS = (
    *("BlockScaling", "CurrentScaling", "DelayedScaling", "MXFP4", "MXFP8", "NVFP4", "RowwiseScaling"),
    "convert",
)
_LATER = {
    **dict.fromkeys(_KERNELS, "fp8scope_kernels"),
    "Alert": "fp8scope.delivery.inbox",
    "Client": "fp8scope.client",
    "ClientError": "fp8scope.client",
    "Command": "fp8scope.control.command_queue",
    "EvaluationError": "fp8scope.evaluation.scores",
    "FinishReport": "fp8scope.recording.finish_report",
    "ItemScores": "fp8scope.evaluation.scores",
    "Run": "fp8scope.run",
    "Step": "fp8scope.step",
    "data_hash": "fp8scope.observe.batch_hash",
    "evaluate_matrix": "fp8scope.evaluation.matrix",
}


def __getattr__(name: str) -> Any:
    # Lazy imports (PEP 562): the kernels need torch, which a program that only logs numbers may not have. A
    # program that begins no run does not pay for importing NumPy and Arrow.
    if name == "integrations":
        return importlib.import_module("fp8scope.integrations")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name == "__version__":
        # From the installed package: the version is defined only in pyproject.toml.
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("fp8scope")
        except PackageNotFoundError:
            # A checkout on the search path that is not installed.
            return "0+unknown"
    raise AttributeError(f"module 'fp8scope' has no attribute {name!r}")


def init(
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] | None = (),
    group: str | None = "",
    baseline: str | None = "",
    seed: int | None = None,
    precision: str | None = None,
    total_steps: int | None = None,
    url: str | None = None,
    token: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    mode: str | None = None,
    resume: str | Mapping[str, Any] | None = None,
    commands: Sequence[str] | None = None,
    shadow: "Recipe | None" = None,
    parent: str | Mapping[str, Any] | None = None,
    relation: str | None = "",
    data_hash: bool = False,
    console: str | None = None,
) -> "Run":
    """Begin a run. Returns immediately and does not wait for the server.

    `project` selects one of several logins; a token belongs to a single project. `group` is shared by runs
    that differ only in their `seed`, by default the entry of this name in `config`. `baseline` is the group
    to compare this run with, or the id of one run.
    `precision` is `bf16`, `fp8`, `fp16` or `fp32`; by default it is that of most matrix products in the first
    training pass of a watched model. `directory` holds the data that the server has not yet acknowledged.
    `mode` is `online`, `offline` (record locally, for `fp8scope sync`) or `disabled`. Without a server
    address and token, `online` becomes `offline`.

    `resume` continues a run, on this or another machine. It is the run's id, a `run.state_dict()` from a
    checkpoint, or "auto": the latest run in this directory unless it finished successfully, else a new run.
    Resuming asks the server for the last attempt, and waits a few seconds at most. All ranks of a job write
    to the same run automatically; FP8SCOPE_RUN_ID sets its id.

    `commands` lists what people and rules may ask of this process: `fallback` (the default), `pause`,
    `resume`; see `fp8scope.control.command_queue`.

    `shadow` is a recipe under which every watched model is also quantised for comparison; see `Run.watch`.

    `parent` is the run that this new run comes from, by its id or the `state_dict()` in its checkpoint, and
    `relation` says how: `resumed` (the default), or `reference` for a run that repeats a part of its parent
    in another precision. A parent that the server does not know is no error.

    `data_hash` logs a hash of the batches of each step, by which the dashboard recognises runs that train on
    the same data. It hashes the inputs of the attached or watched model; see `fp8scope.data_hash`.

    `console` says whose standard output and standard error are recorded: that of "rank0" (the default), of
    "all" ranks, or "off".

    Raises ConfigurationError (a ValueError) if an argument is invalid. Later calls never raise. If the agent
    cannot begin for another reason, such as a broken installation, it says so in one line, and what is
    returned records nothing.
    """
    given = dict(locals())
    try:
        return _begin(given)
    except ConfigurationError:
        raise
    except Exception as error:
        return _unrecorded(error)


def _unrecorded(error: Exception) -> "Run":
    """Return what takes the place of a run that cannot be recorded."""
    from fp8scope.guard import configure_logging
    from fp8scope.unrecorded import unrecorded

    configure_logging()
    return cast("Run", unrecorded(error))


def _begin(given: dict[str, Any]) -> "Run":
    """Begin a run with the arguments of `init`."""
    from fp8scope.arguments import check_init, parent_id, plain_config, seed_in
    from fp8scope.config import settings_from
    from fp8scope.control.command_queue import check_allowed
    from fp8scope.guard import configure_logging
    from fp8scope.metadata.environment import describe_environment
    from fp8scope.process.launch_ranks import rank_of
    from fp8scope.process.open_runs import exit_hooks, finish_previous
    from fp8scope.recording.registration import blank_registration, check_registration, whole
    from fp8scope.run import Run
    from fp8scope.session.resume import identify

    configure_logging()
    check_init(given)
    commands = given["commands"]
    check_allowed(commands)
    settings = settings_from(
        project=given["project"],
        url=given["url"],
        token=given["token"],
        directory=given["directory"],
        mode=given["mode"],
        console=given["console"],
    )
    tags = given["tags"]
    plainly = plain_config(given["config"] or {})
    registration = blank_registration(given["name"] if given["name"] is not None else _default_name()) | {
        "precision": given["precision"] or "unknown",
        "group": given["group"] or "",
        "baseline": given["baseline"] or "",
        "parent": parent_id(given["parent"]),
        "relation": given["relation"] or ("resumed" if given["parent"] else ""),
        "tags": [str(tag) for tag in ((tags,) if isinstance(tags, str) else tags or ())],
        "seed": seed_in(plainly) if given["seed"] is None else whole("seed", given["seed"]),
        "total_steps": whole("total_steps", given["total_steps"]),
        "config": plainly,
    }
    check_registration(registration)
    if settings.mode == "disabled":
        return Run(settings, registration)
    identity = identify(given["resume"], settings)
    registration["environment"] = describe_environment()
    settings = _offline_without_server(settings)
    finish_previous()
    exit_hooks.install()
    run = Run(settings, registration, rank=rank_of(), identity=identity, commands=commands)
    run.shadow = given["shadow"]
    if given["data_hash"]:
        run.session.hash_batches()
    run.session.registration.look_up_repository()
    return run


def _offline_without_server(settings: "Settings") -> "Settings":
    """Switch to offline mode, with a warning, if the server's address or the token is missing."""
    if settings.mode != "online" or (settings.url and settings.token):
        return settings
    missing = "the server address" if not settings.url else "the token"
    logging.getLogger("fp8scope").warning(
        "%s is missing (set FP8SCOPE_URL and FP8SCOPE_TOKEN, or run `fp8scope login`): the run is recorded "
        "locally only.",
        missing,
    )
    from dataclasses import replace

    return replace(settings, mode="offline")


def attach(
    model: "torch.nn.Module | Mapping[str, torch.nn.Module]",
    optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, Any]",
    *,
    tokens_per_step: int = 0,
    reduction: str = "mean",
    every: int | None = None,
    shadow: "Recipe | None" = None,
    include: "Selection | None" = None,
    scaler: "torch.amp.GradScaler | None" = None,
    overhead: "Overhead" = "default",
    readiness: bool = False,
    capture: "str | Sequence[str] | None" = None,
    **arguments: Any,
) -> "Run":
    """Begin a run and record every training step automatically.

    A step is one `optimizer.step()`. Its `loss` is the tensor on which `backward` was called, before
    GradScaler scales it. Several losses of one step are averaged, or summed with `reduction="sum"`; losses
    that the script has already divided by their number are added up. Tokens are counted from `input_ids`, or
    from other integer inputs of two or more dimensions if they all have the same shape. Otherwise pass
    `tokens_per_step`, or log `tokens`. `run.log` adds values to the open step; a step stays open until the
    next forward pass begins.

    `model` may be compiled or wrapped by DistributedDataParallel. Convert a model to FP8 before attaching it.
    Pass several models that are trained together as a mapping by name, and their optimizers under the same
    names: a step is complete once every optimizer has stepped. `every`, `shadow`, `include`, `scaler`,
    `readiness` and `overhead` (the largest share of the step time that watching may add; None: no limit) are
    passed to `Run.watch`, `arguments` to `init`. Without `config`, the results of argparse that the calling
    functions or `__main__` hold are recorded as the configuration. `run.detach()` undoes this call.

    `capture` names other trackers (`wandb`, `tensorboard`, `mlflow`, ...): what the script gives to them is
    recorded in this run as well. "auto" stands for all, "none" for none; the default is FP8SCOPE_CAPTURE,
    else "auto". docs/capture.md says how.

    Raises ConfigurationError (a ValueError) if an argument is invalid. Later calls never raise.
    """
    watching: dict[str, Any] = {
        "every": every,
        "shadow": shadow,
        "include": include,
        "scaler": scaler,
        "readiness": readiness,
    }
    try:
        from fp8scope.autolog.attach import attach_run, check
        from fp8scope.capture.active import capture_into
        from fp8scope.config import check_capture
        from fp8scope.observe.budget import check_overhead
        from fp8scope.run import Run

        trackers = None if capture is None else check_capture(capture, "capture")
        check(model, optimizer, reduction, tokens_per_step, watching)
        if overhead != "default":
            check_overhead(overhead)
    except ConfigurationError:
        raise
    except Exception as error:
        return _unrecorded(error)
    watching["overhead"] = overhead
    if arguments.get("config") is None:
        arguments["config"] = _parsed_arguments()
    run = init(**arguments)
    if isinstance(run, Run):
        try:
            attach_run(
                run, model, optimizer, reduction=reduction, tokens_per_step=tokens_per_step, watching=watching
            )
            capture_into(run, run.session.settings.capture if trackers is None else trackers)
        except ConfigurationError:
            raise
        except Exception as error:
            run.guard.caught("attaching", error)
    return run


def _parsed_arguments() -> dict[str, Any]:
    """The command line that the script has parsed, in place of a configuration."""
    try:
        from fp8scope.autolog.script_config import parsed_by_callers

        config = parsed_by_callers()
    except Exception as error:
        from fp8scope.guard import before_any_run

        before_any_run("reading the script's arguments", error)
        return {}
    if not config:
        logging.getLogger("fp8scope").info("no configuration is recorded: pass attach(..., config={...}).")
    return config


def watch(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None, **how: Any) -> int:
    """Call `Run.watch` on the latest run; returns the number of watched tensors."""
    run = _current_run()
    if run is None:
        logging.getLogger("fp8scope").warning("watch(model) observes nothing: call fp8scope.init first.")
        return 0
    return run.watch(model, optimizer, **how)


def log(scalars: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
    """Call `Run.log` on the latest run."""
    run = _current_run()
    if run is not None:
        run.log(scalars, step=step, **named)
    else:
        logging.getLogger("fp8scope").warning("log(...) records nothing: call fp8scope.init first.")


def finish(timeout: float | None = None) -> "FinishReport | None":
    """Call `Run.finish` on the latest run; returns None if there is no run."""
    run = _current_run()
    if run is None:
        return None
    return run.finish() if timeout is None else run.finish(timeout)


def _current_run() -> "Run | None":
    # Not from `fp8scope.run`, which imports NumPy and Arrow.
    from fp8scope.process.open_runs import current_run

    return cast("Run | None", current_run())


def _default_name() -> str:
    from datetime import UTC, datetime

    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return f"{script or 'run'} {datetime.now(UTC):%Y-%m-%d %H:%M:%S}"[:200]
