"""fp8scope's agent: what a training script imports.

>>> import fp8scope
>>> run = fp8scope.init(name="gpt fp8", mode="disabled")
>>> with run.step(tokens=4096) as step:
...     step.log(loss=2.3)
>>> run.finish().complete
True

Torch is imported only when a model is converted or watched, NumPy and Arrow only when a run begins.
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

    from fp8scope.config import Settings
    from fp8scope.control.command_queue import Command
    from fp8scope.delivery.inbox import Alert
    from fp8scope.observe.budget import Overhead
    from fp8scope.recording.finish_report import FinishReport
    from fp8scope.run import Run
    from fp8scope.step import Step
    from fp8scope_kernels import (
        MXFP8,
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
    "MXFP8",
    "Alert",
    "BlockScaling",
    "Command",
    "ConfigurationError",
    "CurrentScaling",
    "DelayedScaling",
    "FinishReport",
    "RowwiseScaling",
    "Run",
    "Step",
    "attach",
    "convert",
    "finish",
    "init",
    "log",
    "watch",
]

_KERNELS = ("BlockScaling", "CurrentScaling", "DelayedScaling", "MXFP8", "RowwiseScaling", "convert")
_LATER = {
    **dict.fromkeys(_KERNELS, "fp8scope_kernels"),
    "Alert": "fp8scope.delivery.inbox",
    "Command": "fp8scope.control.command_queue",
    "FinishReport": "fp8scope.recording.finish_report",
    "Run": "fp8scope.run",
    "Step": "fp8scope.step",
}


def __getattr__(name: str) -> Any:
    # PEP 562: the kernels need torch, which a program that only sends numbers may not have; and a program
    # that imports this and begins no run pays neither for NumPy nor for Arrow.
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name == "__version__":
        # The installed package's: pyproject.toml is the only place with a version.
        from importlib.metadata import version

        return version("fp8scope")
    raise AttributeError(f"module 'fp8scope' has no attribute {name!r}")


def init(
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    group: str = "",
    baseline: str = "",
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
) -> "Run":
    """Begin a run. Returns at once, whether the server answers or not.

    `project` chooses among several logins; the token itself belongs to one project. `group` names the runs
    that differ only in their seed, `baseline` the group that this run is compared with. `precision` is
    `bf16`, `fp8`, ... (found out by `watch` when not given). `directory` is where what was not yet
    acknowledged is kept. `mode`: `online`, `offline` (only kept, for `fp8scope sync`) or `disabled`; without
    a server to send to, `offline`.

    `resume` continues a run, here or on another machine: its id, what `run.state_dict()` had put into a
    checkpoint, or "auto", which is the run that was begun last with this directory unless it ended well, else
    a new one. Only then is the server asked, for a few seconds at most, which attempt was the last. The ranks
    of one job write to one run by themselves; FP8SCOPE_RUN_ID sets its id.

    `commands`: what people and rules may ask of this process, among `fallback` (the default), `pause` and
    `resume`; see `fp8scope.commands`.

    `shadow`: the recipe under which every watched model is quantised beside its training; see `Run.watch`.

    Raises ConfigurationError (a ValueError) when an argument cannot be meant. Nothing after this call raises.
    """
    given = dict(locals())
    from fp8scope.arguments import check_init, plain_config
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
    check_allowed(commands)
    settings = settings_from(project=project, url=url, token=token, directory=directory, mode=mode)
    registration = blank_registration(name if name is not None else _default_name()) | {
        "precision": precision or "unknown",
        "group": group,
        "baseline": baseline,
        "tags": [str(tag) for tag in ((tags,) if isinstance(tags, str) else tags)],
        "seed": whole("seed", seed),
        "total_steps": whole("total_steps", total_steps),
        "config": plain_config(config or {}),
    }
    check_registration(registration)
    if settings.mode == "disabled":
        return Run(settings, registration)
    identity = identify(resume, settings)
    registration["environment"] = describe_environment()
    settings = _offline_without_server(settings)
    finish_previous()
    exit_hooks.install()
    run = Run(settings, registration, rank=rank_of(), identity=identity, commands=commands)
    run.shadow = shadow
    run.session.registration.look_up_repository()
    return run


def _offline_without_server(settings: "Settings") -> "Settings":
    """The settings; where there is no server to send to, those of a run that is only kept. That is told."""
    if settings.mode != "online" or (settings.url and settings.token):
        return settings
    missing = "a server's address" if not settings.url else "a token"
    logging.getLogger("fp8scope").warning(
        "%s is missing (FP8SCOPE_URL and FP8SCOPE_TOKEN, or `fp8scope login`): the run is only kept.", missing
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
    **arguments: Any,
) -> "Run":
    """Begin a run and record every step of the training that follows, without another line.

    A step is one `optimizer.step()`; its `loss` is what `backward` was called on, before GradScaler's
    scaling. Of several backward passes in one step the mean is taken, or with `reduction="sum"` the sum;
    losses that the script divided by their number are added up. Tokens are counted from `input_ids`, or other
    integer inputs of two or more dimensions where these are of one shape; else say `tokens_per_step`, or log
    `tokens`. `run.log` adds values to the step that is open, which it is until the next forward pass begins.

    `model` may be compiled or wrapped by DistributedDataParallel; an FP8 model is converted before. Several
    models that are trained together are given by name, with their optimizers under the same names: a step is
    complete when every optimizer has stepped. `every`, `shadow`, `include`, `scaler` and `overhead` (the
    share of the steps' time that watching may take; None: no limit) are those of `Run.watch`, `arguments`
    those of `init`. `run.detach()` undoes it.

    Raises ConfigurationError (a ValueError) when an argument cannot be meant. Nothing after this call raises.
    """
    from fp8scope.autolog.attach import attach_run, check
    from fp8scope.observe.budget import check_overhead

    watching: dict[str, Any] = {"every": every, "shadow": shadow, "include": include, "scaler": scaler}
    check(model, optimizer, reduction, tokens_per_step, watching)
    if overhead != "default":
        check_overhead(overhead)
    watching["overhead"] = overhead
    run = init(**arguments)
    attach_run(run, model, optimizer, reduction=reduction, tokens_per_step=tokens_per_step, watching=watching)
    return run


def watch(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None, **how: Any) -> int:
    """`Run.watch` of the run that was begun last; returns the number of tensors."""
    run = _current_run()
    if run is None:
        logging.getLogger("fp8scope").warning("watch(model) observes nothing: call fp8scope.init first.")
        return 0
    return run.watch(model, optimizer, **how)


def log(scalars: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
    """`Run.log` of the run that was begun last."""
    run = _current_run()
    if run is not None:
        run.log(scalars, step=step, **named)
    else:
        logging.getLogger("fp8scope").warning("log(...) records nothing: call fp8scope.init first.")


def finish(timeout: float | None = None) -> "FinishReport | None":
    """`Run.finish` of the run that was begun last; None when there is none."""
    run = _current_run()
    if run is None:
        return None
    return run.finish() if timeout is None else run.finish(timeout)


def _current_run() -> "Run | None":
    # Not from `fp8scope.run`: a program that begins no run does not import NumPy and Arrow.
    from fp8scope.process.open_runs import current_run

    return cast("Run | None", current_run())


def _default_name() -> str:
    from datetime import UTC, datetime

    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return f"{script or 'run'} {datetime.now(UTC):%Y-%m-%d %H:%M:%S}"[:200]
