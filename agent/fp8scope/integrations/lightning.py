"""Lightning (`lightning` or `pytorch_lightning`): `Trainer(callbacks=[Fp8scopeCallback(project="...")])`.

`Trainer(logger=Fp8scopeLogger(project="..."))` records only what the module logs, without any tensor.
"""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import fp8scope
from fp8scope.autolog.attach import attach_run, attachment_of, check
from fp8scope.autolog.inspection import token_count
from fp8scope.integrations.common import Begin, Convert, converter, kept, scalars_of
from fp8scope.integrations.lightning_logger import LoggerMethods, logger_of
from fp8scope.observe.timing.clock import BACKWARD, DATA, FORWARD, OTHER

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger

    from fp8scope.run import Run
    from fp8scope_kernels import Recipe
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    # The two packages define different classes: import from the one that the program uses.
    from pytorch_lightning import Callback
    from pytorch_lightning.loggers import Logger
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.loggers import Logger
    except ModuleNotFoundError:
        from pytorch_lightning import Callback
        from pytorch_lightning.loggers import Logger


PRECISIONS: Final[Mapping[str, str]] = {
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
    "32-true": "fp32",
}
"""The Trainer's name of a precision, and a run's."""


class Fp8scopeLogger(LoggerMethods, Logger):
    """Records what a `Trainer` gives to its loggers; see `LoggerMethods`."""


class Fp8scopeCallback(Callback):
    """Records every optimizer step of a `Trainer`, and the values that the module logs.

    `run` is a run that has already begun. Without it `fit` starts one with `arguments` as for
    `fp8scope.init`; the seed and the module's hyperparameters are filled in. `convert` is a recipe: the
    module's linear layers are converted to FP8 before its optimizers are created. Tokens are counted from
    integer inputs in the batch unless `tokens_per_step` is given.

    `loss` is the loss that the Trainer differentiates. Values that the module logs keep their names;
    validation and test scores are added to the last step. The run ends with the process, with
    `callback.run.finish()`, or at the next call of `fit`, which starts another run.
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
        """Names of the values that the module has logged while training."""
        self._scores: set[str] = set()
        """Names of the values that the module has logged in validation and test."""
        self.last: dict[str, Any] = {}
        """The values that the module has logged last, which are recorded."""
        self._logger: LoggerMethods | None = None
        self._waiting = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Convert the module before its optimizers are created."""
        if stage == "fit" and self._convert is not None:
            self._convert(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the run and follow the optimizers."""
        facts = _facts(trainer, pl_module)
        if self.run is not None and not self._given:
            self.run.finish()
            self.run = None
        self._logger = logger = logger_of(trainer)
        begun = self.run
        if logger is not None:
            logger.beside, begun = self, self.run or logger.values.run
            # The logger adds them to the configuration.
            facts["config"].pop("hyperparameters")
        if begun is None:
            arguments = {} if logger is None else logger.values.arguments
            self.run = self._begin(**(facts | arguments | self._arguments))
        else:
            self.run = begun
            self.run.detach()
            self.run.log_config(facts["config"])
        if logger is not None:
            logger.values.use(self.run)
        check(pl_module, trainer.optimizers, "mean", self._tokens_per_step)
        # The Trainer does not call the module itself: `on_train_batch_start` counts the tokens.
        attach_run(
            self.run,
            pl_module,
            trainer.optimizers,
            tokens_per_step=self._tokens_per_step,
            counts_inputs=False,
        )
        registration = self.run.session.registration
        # Nor can the products be seen outside of the module's own call.
        if registration.lacks_precision and str(trainer.precision) in PRECISIONS:
            registration.set("precision", PRECISIONS[str(trainer.precision)])
        if trainer.global_step:
            self.run.session.steps.number = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step if necessary, and count the batch's tokens."""
        attachment = attachment_of(self.run) if self.run is not None else None
        if attachment is not None:
            inputs = batch if isinstance(batch, tuple | list) else (batch,)
            attachment.forward_begins(token_count(inputs, {}))
            attachment.hash_inputs(inputs)
            self._mark(DATA if self._waiting else OTHER)
            self._waiting = True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Mark the end of the forward pass, which in Lightning is inside the optimizer's step."""
        self._mark(FORWARD)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Mark the end of the backward pass."""
        self._mark(BACKWARD)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Do not count the time until the next batch as waiting for data."""
        self._waiting = False

    def _mark(self, phase: int) -> None:
        if self.run is not None and not self.run.finished:
            with self.run.guard.shield("measuring a batch"):
                self.run.session.steps.measures.mark(phase)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the values that the module has logged in this batch."""
        logged = {k: v for k, v in self._values(trainer).items() if k not in self._scores}
        self._trained |= logged.keys()
        # Values of an epoch stay in `callback_metrics`: record each only once.
        self._log({name: value for name, value in logged.items() if value is not self.last.get(name)})
        self.last = logged

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the scores to the last step."""
        if not trainer.sanity_checking:
            self._log_scores(trainer)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the scores to the last step."""
        self._log_scores(trainer)

    def _log_scores(self, trainer: Any) -> None:
        scores = {k: v for k, v in self._values(trainer).items() if k not in self._trained}
        self._scores |= scores.keys()
        self._log(scores)

    def _values(self, trainer: Any) -> dict[str, Any]:
        """The values that the module has logged, without those that the logger records."""
        names = set() if self._logger is None else self._logger.own_names
        return {name: value for name, value in trainer.callback_metrics.items() if name not in names}

    def _log(self, values: Mapping[str, Any]) -> None:
        if self.run is not None and not self.run.finished:
            self.run.log(scalars_of(values))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record the failure here: after some exceptions Lightning ends the process itself."""
        if self.run is not None:
            self.run.session.note_failure(exception)


def _facts(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """Return what the Trainer knows about the run, as arguments of `fp8scope.init`."""
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
    """Add the callback to a Trainer that is already running, for `fp8scope run`."""
    if any(isinstance(callback, Fp8scopeCallback) for callback in trainer.callbacks):
        return
    callback = Fp8scopeCallback(tokens_per_step=tokens_per_step)
    callback._convert = convert
    callback._begin = kept(begin, keep)
    trainer.callbacks.append(callback)
    callback.setup(trainer, trainer.lightning_module, "fit")
    if trainer.optimizers:
        # Training has already begun: the callback missed these events.
        callback.on_train_start(trainer, trainer.lightning_module)
        callback.on_train_batch_start(trainer, trainer.lightning_module, None, 0)
