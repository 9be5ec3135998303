"""Hugging Face Transformers: `Trainer(..., callbacks=[Fp8scopeCallback(project="...")])`.

Once this module is imported, or in `fp8scope run`, `report_to="fp8scope"` does the same, also in trainers
that are derived from it, as TRL's.
"""

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

import fp8scope
from fp8scope.autolog.attach import attach_run, check
from fp8scope.capture import active
from fp8scope.integrations.common import Begin, Convert, converter, kept, scalars_of
from fp8scope.observe.tensors.base import unwrapped

if TYPE_CHECKING:
    from fp8scope.run import Run
    from fp8scope_kernels import Recipe

# Every step records these itself, without rounding.
_KNOWN = ("loss", "learning_rate")
# `on_evaluate` records evaluations; totals of the training are not values of a step.
_OTHERS = ("eval_", "train_", "test_")


class Fp8scopeCallback(TrainerCallback):
    """Records every step of a `Trainer`, and its evaluations.

    `run` is a run that has already begun. Without it `train` starts one with `arguments` as for
    `fp8scope.init`, named like the Trainer's run by default, with the Trainer's settings as configuration.
    `convert` is a recipe: the model's linear layers are converted to FP8 before the first step. Tokens are
    counted from `input_ids` unless `tokens_per_step` is given.

    The loss of a step is the one the Trainer differentiates, not rounded and not averaged over logging steps.
    Evaluations become scalars `eval/...` of the last step; other values that the Trainer logs become
    `trainer/...`. The run ends with the process, with `callback.run.finish()`, or at the next call of
    `train`, which starts another run.
    """

    def __init__(
        self,
        run: "Run | None" = None,
        *,
        convert: "Recipe | None" = None,
        tokens_per_step: int = 0,
        **arguments: Any,
    ) -> None:
        self.run = run
        self._given = run is not None
        self._convert = converter(convert)
        self._tokens_per_step = tokens_per_step
        self._arguments = arguments
        self._begin: Begin = fp8scope.init
        self._trainer_arguments: TrainingArguments | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called when the Trainer is complete: take precedence over a callback of `report_to`."""
        self._trainer_arguments = args
        _given[id(args)] = self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model, begin the run and follow the optimizer."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self._convert is not None:
            self._convert(unwrapped(model))
        facts = _facts(args, state, model)
        if self.run is not None and not self._given:
            self.run.finish()
            self.run = None
        if self.run is None:
            self.run = self._begin(**(facts | self._arguments))
        else:
            self.run.detach()
            self.run.log_config(facts["config"])
        check(model, optimizer, "sum", self._tokens_per_step)
        # "sum": the Trainer already divides accumulated losses by passes or tokens.
        attach_run(self.run, model, optimizer, reduction="sum", tokens_per_step=self._tokens_per_step)
        if state.global_step:
            self.run.session.steps.number = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the values that the Trainer logs in a step."""
        if self.run is None or self.run.finished:
            return
        capture = active.current()
        for name, value in scalars_of(logs or {}).items():
            if capture is not None and capture.has(name, value):
                # A tracker of the Trainer got it before, and it is recorded under that name.
                continue
            if name not in _KNOWN and not name.startswith(_OTHERS):
                self.run.log({f"trainer/{name}": value})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the scores of an evaluation to the last step."""
        if self.run is not None and not self.run.finished:
            values = scalars_of(metrics or {})
            self.run.log({f"eval/{name.removeprefix('eval_')}": value for name, value in values.items()})


_given: "weakref.WeakValueDictionary[int, Fp8scopeCallback]" = weakref.WeakValueDictionary()
"""The callbacks that scripts have given to Trainers, by the id of the Trainer's arguments."""


class ReportedCallback(Fp8scopeCallback):
    """Stands for `report_to="fp8scope"`. Beside a callback that the script gives, it does nothing."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called when the Trainer is complete."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the run, unless another callback does."""
        if id(args) not in _given:
            super().on_train_begin(args, state, control, **kwargs)


# In `fp8scope run` the name stands for a callback that does nothing: the trainer gets one of its own.
integration_utils.INTEGRATION_TO_CALLBACK.setdefault("fp8scope", ReportedCallback)


def _facts(args: TrainingArguments, state: TrainerState, model: nn.Module) -> dict[str, Any]:
    """Return what the Trainer knows about the run, as arguments of `fp8scope.init`."""
    config: dict[str, Any] = {"trainer": args.to_dict()}
    settings: Any = getattr(unwrapped(model), "config", None)
    if hasattr(settings, "to_dict"):
        config["model"] = settings.to_dict()
    facts: dict[str, Any] = {"config": config, "seed": args.seed, "total_steps": state.max_steps}
    name = getattr(args, "run_name", None)
    # The default `run_name` is the output folder: a path, not a name.
    return facts | ({"name": str(name)[:200]} if name and name != args.output_dir else {})


def join(trainer: Any, begin: Begin, convert: Convert | None, tokens_per_step: int, keep: Any) -> None:
    """Add the callback to a Trainer that is already running, for `fp8scope run`."""
    if any(isinstance(callback, Fp8scopeCallback) for callback in trainer.callback_handler.callbacks):
        return
    callback = Fp8scopeCallback(tokens_per_step=tokens_per_step)
    callback._convert = convert
    callback._begin = kept(begin, keep)
    trainer.add_callback(callback)
    if trainer.state.max_steps and trainer.is_in_train and trainer.optimizer is not None:
        # Training has already begun, with an optimizer that the script created.
        callback.on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.optimizer
        )
