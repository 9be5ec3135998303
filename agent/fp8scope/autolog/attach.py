"""`fp8scope.attach(model, optimizer)`: record a training loop without changing it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from fp8scope.arguments import check_watch
from fp8scope.autolog.attachment import Attachment
from fp8scope.autolog.inspection import models_and_optimizers
from fp8scope.config import ConfigurationError
from fp8scope.observe.tensors.base import unwrapped
from fp8scope.process.open_runs import OpenRun, is_interactive, live_runs
from fp8scope.recording.registration import whole

if TYPE_CHECKING:
    from fp8scope.run import Run

REDUCTIONS = ("mean", "sum")


def check(
    model: Any,
    optimizer: Any,
    reduction: object,
    tokens_per_step: int,
    watching: Mapping[str, Any] | None = None,
) -> None:
    """Raise ConfigurationError if `attach_run` cannot follow this model and optimizer."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ConfigurationError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    tokens = whole("tokens_per_step", tokens_per_step)
    if tokens is None:
        raise ConfigurationError("tokens_per_step must be a whole number; leave it out if it is not known.")
    if tokens < 0:
        raise ConfigurationError(f"tokens_per_step must not be negative, got {tokens_per_step}.")
    if watching is not None:
        check_watch(**watching)
    for given, _ in models_and_optimizers(model, optimizer).values():
        # In a notebook a cell may be run again: `init` finishes earlier runs there.
        for run in () if is_interactive() else live_runs:
            attachment = attachment_of(run)
            if attachment is not None and attachment.name_of(given) is not None:
                raise ConfigurationError(
                    f"the model is already attached to the run {run.name!r}: call its finish() or detach() "
                    "first."
                )


def attachment_of(run: "Run | OpenRun") -> Attachment | None:
    """Return the attachment that `fp8scope.attach` or `fp8scope run` gave the run, or None."""
    follower = run.session.follower
    return follower if isinstance(follower, Attachment) else None


def attach_run(
    run: "Run",
    model: Any,
    optimizer: Any,
    *,
    reduction: str = "mean",
    tokens_per_step: int = 0,
    counts_inputs: bool = True,
    watching: Mapping[str, Any] | None = None,
) -> "Attachment | None":
    """Have `run` follow the training of a model that passed `check`. Returns None if the run records nothing.

    With `counts_inputs=False` the caller counts the tokens of a forward pass. `watching` holds arguments of
    `Run.watch`.
    """
    if run.session.settings.mode == "disabled" or run.finished:
        return None
    attachment = Attachment(
        run,
        reduction=reduction,
        tokens_per_step=whole("tokens_per_step", tokens_per_step) or 0,
        counts_inputs=counts_inputs,
    )
    run.session.attach(attachment)
    for name, (followed, optimizers) in models_and_optimizers(model, optimizer).items():
        follow(run, attachment, name, followed, optimizers, watching)
    return attachment


def attach_by_hand(run: "Run", model: nn.Module, *, tokens_per_step: int = 0) -> "Attachment | None":
    """Like `attach_run`, for a model that the script updates without an optimizer."""
    if run.session.settings.mode == "disabled" or run.finished:
        return None
    attachment = Attachment(run, tokens_per_step=tokens_per_step)
    run.session.attach(attachment)
    watch(run, model, None)
    attachment.follow("", model, [])
    return attachment


def follow(
    run: "Run",
    attachment: Attachment,
    name: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    watching: Mapping[str, Any] | None = None,
) -> None:
    """Watch another model and follow its training. The names of its tensors begin with `name`."""
    # Watch first: its hooks must measure the optimizer's step before the attachment's hook ends the step.
    for optimizer in optimizers:
        watch(run, model, optimizer, name, watching)
    attachment.follow(name, model, optimizers)


def watch(
    run: "Run",
    model: nn.Module,
    optimizer: Optimizer | None,
    name: str = "",
    watching: Mapping[str, Any] | None = None,
) -> None:
    """Observe a model and an optimizer in the run. The names of the model's tensors begin with `name`."""
    watched = nn.ModuleDict({name: unwrapped(model)}) if name else model
    run.watch(watched, optimizer, **(watching or {}))
