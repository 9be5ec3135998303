"""Two lines and nothing else: `run = fp8scope.attach(model, optimizer)`."""

from typing import TYPE_CHECKING, Any

from torch import nn

from fp8scope.attachment.following import Attachment
from fp8scope.attachment.inputs import models_and_optimizers, unwrap_model
from fp8scope.config import ConfigurationError
from fp8scope.hooks import live_runs
from fp8scope.registration import whole

if TYPE_CHECKING:
    from fp8scope.run import Run

REDUCTIONS = ("mean", "sum")


def check(model: Any, optimizer: Any, reduction: str, tokens_per_step: int) -> None:
    """Raise ConfigurationError when `attach_run` could not follow these."""
    if reduction not in REDUCTIONS:
        raise ConfigurationError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if (whole("tokens_per_step", tokens_per_step) or 0) < 0:
        raise ConfigurationError(f"tokens_per_step must not be negative, got {tokens_per_step}.")
    for given, _ in models_and_optimizers(model, optimizer).values():
        for run in live_runs:
            if run._attachment is not None and run._attachment.follows(given):
                raise ConfigurationError(
                    f"the model is attached to the run {run.name!r} already: call finish() or detach() of it "
                    "first."
                )


def attach_run(
    run: "Run", model: Any, optimizer: Any, *, reduction: str = "mean", tokens_per_step: int = 0
) -> "Attachment | None":
    """Have `run` follow the training of these, which `check` has let pass; None when it records nothing."""
    if run._settings.mode == "disabled" or run.finished:
        return None
    attachment = Attachment(run, reduction=reduction, tokens_per_step=tokens_per_step)
    run.detach()
    run._attachment = attachment
    for name, (one, optimizers) in models_and_optimizers(model, optimizer).items():
        follow(run, attachment, name, one, optimizers)
    return attachment


def follow(run: "Run", attachment: Attachment, name: str, model: nn.Module, optimizers: "list[Any]") -> None:
    """Watch one model more and follow its training. Its tensors' names begin with `name`."""
    inner = unwrap_model(model)
    watched = nn.ModuleDict({name: inner}) if name else inner
    # Watched first: what it measures of the optimizer's step is then measured before the step ends here.
    run.watch(watched, optimizers[0])
    for optimizer in optimizers[1:]:
        run.watch(watched, optimizer)
    attachment.follow(name, model, optimizers)
