"""Lightning (`lightning` or `pytorch_lightning`): `Trainer(callbacks=[Fp8scopeCallback(project="...")])`."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import fp8scope
from fp8scope.autolog.attach import attach_run, attachment_of, check
from fp8scope.autolog.inspection import token_count
from fp8scope.integrations.common import Begin, Convert, converter, kept, scalars_of
from fp8scope.observe.timing.clock import BACKWARD, DATA, FORWARD, OTHER

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from fp8scope.run import Run
    from fp8scope_kernels import Recipe
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    # Two packages of one library, whose classes differ: take the one that the program uses.
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback


class Fp8scopeCallback(Callback):
    """Records every optimizer step of a `Trainer`, and what the module logs.

    `run`: one that was begun already; else `fit` begins one, with `arguments` as for `fp8scope.init`, the
    seed and the module's hyperparameters filled in. `convert`: the recipe by which the module's linear layers
    are made FP8 before its optimizers are. Tokens are counted from integer inputs in the batch, or
    `tokens_per_step` are taken.

    `loss` is what the Trainer differentiates; what the module logs while it trains keeps its name, and so do
    validation and test scores, which are scalars of the last step. The run ends with the process, with
    `callback.run.finish()`, or when `fit` is called once more, which begins another.
    """

    def __init__(
        self,
        run: "Run | None" = None,
        *,
        convert: "Recipe | None" = None,
        tokens_per_step: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.run = run
        self._given = run is not None
        self._convert = converter(convert)
        self._tokens_per_step = tokens_per_step
        self._arguments = arguments
        self._begin: Begin = fp8scope.init
        self._trained: set[str] = set()
        self._scores: set[str] = set()
        """Names of what the module has logged while it trained, and while it was evaluated."""
        self._last: dict[str, Any] = {}
        self._waiting = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Convert the module while it has no optimizer yet."""
        if stage == "fit" and self._convert is not None:
            self._convert(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the run and follow the optimizers."""
        facts = _facts(trainer, pl_module)
        if self.run is not None and not self._given:
            self.run.finish()
            self.run = None
        if self.run is None:
            self.run = self._begin(**(facts | self._arguments))
        else:
            self.run.detach()
            self.run.log_config(facts["config"])
        check(pl_module, trainer.optimizers, "mean", self._tokens_per_step)
        # A LightningModule is not called: the batch is counted where it begins.
        attach_run(
            self.run,
            pl_module,
            trainer.optimizers,
            tokens_per_step=self._tokens_per_step,
            counts_inputs=False,
        )
        if trainer.global_step:
            self.run.session.steps.number = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A forward pass is about to begin."""
        attachment = attachment_of(self.run) if self.run is not None else None
        if attachment is not None:
            inputs = batch if isinstance(batch, tuple | list) else (batch,)
            attachment.forward_begins(token_count(inputs, {}))
            self._mark(DATA if self._waiting else OTHER)
            self._waiting = True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The forward pass has ended: in Lightning all of it is part of an optimizer's step."""
        self._mark(FORWARD)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward pass has ended."""
        self._mark(BACKWARD)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """What lies between now and the next batch is no wait for data."""
        self._waiting = False

    def _mark(self, phase: int) -> None:
        if self.run is not None and not self.run.finished:
            with self.run.guard.shield("measuring a batch"):
                self.run.session.steps.measures.mark(phase)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add what the module has logged in this batch."""
        logged = {k: v for k, v in trainer.callback_metrics.items() if k not in self._scores}
        self._trained |= logged.keys()
        # An epoch's values stay where they are until there are others.
        self._log({name: value for name, value in logged.items() if value is not self._last.get(name)})
        self._last = logged

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the scores to the step that was made last."""
        if not trainer.sanity_checking:
            self._log_scores(trainer)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the scores to the step that was made last."""
        self._log_scores(trainer)

    def _log_scores(self, trainer: Any) -> None:
        found = {k: v for k, v in trainer.callback_metrics.items() if k not in self._trained}
        self._scores |= found.keys()
        self._log(found)

    def _log(self, values: Mapping[str, Any]) -> None:
        if self.run is not None and not self.run.finished:
            self.run.log(scalars_of(values))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning ends the program itself after some of them."""
        if self.run is not None:
            self.run.session.note_failure(exception)


def _facts(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """What the Trainer knows of the run, as arguments of `fp8scope.init`."""
    config = {
        "module": type(pl_module).__name__,
        "hyperparameters": dict(pl_module.hparams),
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
    }
    steps = trainer.estimated_stepping_batches
    facts: dict[str, Any] = {
        "config": config,
        "total_steps": int(steps) if 0 < steps < float("inf") else None,
    }
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return facts | ({"seed": int(seed)} if seed.isdecimal() else {})


def join(trainer: Any, begin: Begin, convert: Convert | None, tokens_per_step: int, keep: Any) -> None:
    """For `fp8scope run`: add the callback to a Trainer that is at work already."""
    if any(isinstance(callback, Fp8scopeCallback) for callback in trainer.callbacks):
        return
    callback = Fp8scopeCallback(tokens_per_step=tokens_per_step)
    callback._convert = convert
    callback._begin = kept(begin, keep)
    trainer.callbacks.append(callback)
    callback.setup(trainer, trainer.lightning_module, "fit")
    if trainer.optimizers:
        # Training has begun already: its optimizers were made before.
        callback.on_train_start(trainer, trainer.lightning_module)
        callback.on_train_batch_start(trainer, trainer.lightning_module, None, 0)
