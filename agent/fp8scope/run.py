"""A training run, as the training script sees it."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8scope.config import ArgumentTypeError, Settings
from fp8scope.control.controller import Controls
from fp8scope.delivery.alert import Alert
from fp8scope.observe.budget import Overhead, check_overhead
from fp8scope.observe.collector import is_tensor, whole_steps
from fp8scope.process import open_runs
from fp8scope.recording.entries import Document
from fp8scope.recording.evaluation import evaluation_document
from fp8scope.recording.records import Kind, dump_json
from fp8scope.recording.registration import blank_registration, check_registration
from fp8scope.session.entries import Entries, plain_entries
from fp8scope.session.resume import Identity
from fp8scope.session.steps import Stepping
from fp8scope.step import MAX_SCALARS, Step, as_mapping

if TYPE_CHECKING:
    import torch

    from fp8scope.autolog.attachment import Attachment
    from fp8scope_kernels import Recipe
    from fp8scope_kernels.convert import Selection

LOOKUP_AT_END = 0.5
"""Seconds that the end of a run waits for git, if no step was recorded since it answered."""


class Run(Controls, Stepping):
    """A run that is being recorded; made by `fp8scope.init`. One thread at a time may use it."""

    def __init__(
        self,
        settings: Settings,
        registration: Mapping[str, Any],
        *,
        rank: int = 0,
        identity: Identity | None = None,
        commands: Sequence[str] | None = None,
    ) -> None:
        super().__init__(settings, registration, identity or Identity(str(uuid.uuid4())), rank=rank)
        self._init_controls(commands)
        self._attachment: Attachment | None = None
        self.shadow: Recipe | None = None
        """The recipe of `watch` where it is given none."""
        self._start()
        open_runs.opened(self)

    def watch(
        self,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer | None" = None,
        *,
        every: int | None = None,
        shadow: "Recipe | None" = None,
        include: "Selection | None" = None,
        scaler: "torch.amp.GradScaler | None" = None,
        overhead: Overhead = "default",
    ) -> int:
        """Observe `model` from the next step on; returns the number of tensors observed.

        Each step's time, memory and FLOP/s are measured as well; with its `optimizer` also the learning rate
        and the gradients' norm. `fp8scope.observe.timing` has the list.

        Observed are FP8 layers (ours, torchao's, Transformer Engine's), and the linear layers that `convert`
        would make FP8: of these, which are not quantised, amax and non-finite elements, so that a BF16 run
        can be laid beside an FP8 one. `shadow`: a recipe under which these are quantised beside the training,
        which stays as it is; `include` names other modules than the linear layers for it, `scaler` the
        GradScaler whose factor is to be divided out of their gradients.

        What is dear is taken only in step 1 and every `every`-th step after it (100; 0: never): the shadow's
        casts, exponents and quantisation error, and with `optimizer` also gradients of the weights, moments
        and updates. docs/watching.md has the list.

        `overhead`: the share of the steps' time that watching may take, above 0 and at most 1. The agent
        measures what it takes, and reads the tensors of layers that are not FP8 only in every second, fourth,
        ... step where that is needed to stay inside; losses and FP8 layers' counters come with every step.
        None reads every tensor at every step. By default FP8SCOPE_OVERHEAD, else 0.02; it holds for the run.

        Raises ConfigurationError if `overhead` is invalid, and nothing else.

        The model keeps no reference to the run: it can be copied and pickled as before.
        """
        count = 0
        if overhead != "default":
            self._budget.limit(check_overhead(overhead))
        with self.guard.shield("watching the model"):
            if self._active():
                self._measures.watch(model, optimizer)
                self._watch_layers(model)
                from fp8scope.observe.tensors import Watching

                if every is not None:
                    self._collector.every = whole_steps(every)
                how = Watching(shadow=shadow or self.shadow, include=include, scaler=scaler)
                count = self._collector.watch(model, optimizer, how)
                if count == 0:
                    self.guard.tell_once(
                        "watch",
                        "no FP8 layer found in the model, and none that could be one.",
                    )
                elif (recipe := self._collector.recipe) and not self._registration["recipe"]:
                    self._registration["recipe"] = dict(recipe)
                    if self._registration["precision"] == "unknown" and "shadow" not in recipe:
                        self._registration["precision"] = "fp8"
                    self._register()
        return count

    def step(self, tokens: int = 0, *, number: int | None = None) -> Step:
        """A `with` block around one optimizer step that trains on `tokens` tokens.

        Steps are numbered from 1; `number` sets the number, and those after it go on from there.
        """
        if number is not None or type(tokens) is not int:
            return self._numbered_step(tokens, number)
        self._step = following = self._step + 1
        try:
            self._collector.begin(following)
        except Exception as error:
            self.guard.caught("beginning a step", error)
        return Step(self, following, tokens)

    def _numbered_step(self, tokens: Any, number: Any) -> Step:
        """`step` in all but the most frequent case."""
        following, counted = self._step + 1, 0
        with self.guard.shield("beginning a step"):
            if number is not None:
                if int(number) < 0:
                    raise ValueError(f"a step's number must not be negative, got {number}")
                following = int(number)
            if is_tensor(tokens):
                raise TypeError("tokens must be a plain number: reading a tensor would wait for the device")
            counted = int(tokens)
            self._collector.begin(following)
        self._step = following
        return Step(self, following, counted)

    def log(
        self, scalars: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any
    ) -> None:
        """Add values to the step that is open, as `Step.log` does; before the first one, to that.

        After `fp8scope.attach` a step is open until the next one's forward pass begins, so that what is
        logged right after `optimizer.step()` belongs to it. `tokens=` is how many tokens this step trains on.

        `step` is the number of the step that the values belong to. A script that has no steps otherwise makes
        them by it: calls with the same number make one step, which is recorded when a later one begins. An
        earlier number is counted as an error, and its values are not recorded. Where steps are made by
        `run.step` or found by `attach`, these are what values are added to, whatever number is given.
        """
        values = as_mapping(self.guard, scalars, named)
        if self.finished:
            self.guard.tell_once("log", "run.log: the run is finished; what is logged now is not recorded.")
            return
        if step is not None:
            with self.guard.shield("logging at a step"):
                if self._active():
                    self._log_at(step, values)
            return
        if self._open is None:
            if len(self._early) < MAX_SCALARS:
                self._early |= values
            return
        if "tokens" in values:
            with self.guard.shield("logging 'tokens'"):
                tokens = values["tokens"]
                if is_tensor(tokens) and tokens.device.type != "cpu":
                    raise TypeError("tokens must be a plain number: reading one would wait for the device")
                self._open.count_tokens(int(tokens) - self._open.tokens)
            values = {name: value for name, value in values.items() if name != "tokens"}
        self._open.log(values)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Add to the run's configuration, as given to `init`; a key that is there already is replaced."""
        with self.guard.shield("recording the configuration"):
            if self._active():
                self._registration["config"] = {**self._registration["config"], **plain_entries(config)}
                self._register()

    @property
    def config(self) -> Entries:
        """The run's configuration. Entries can be set while it runs, `log_config` sets them at once."""
        return Entries(lambda: self._registration["config"], lambda new: self._add_entries("config", new))

    @property
    def summary(self) -> Entries:
        """Results of the run as a whole, such as its best score; what the script sets, nothing by itself."""
        return Entries(
            lambda: self._registration.get("summary", {}), lambda new: self._add_entries("summary", new)
        )

    @property
    def tags(self) -> tuple[str, ...]:
        """The run's tags, 50 at most. To set them replaces them: `run.tags += ("diverged",)`."""
        return tuple(self._registration["tags"])

    @tags.setter
    def tags(self, tags: Sequence[str]) -> None:
        with self.guard.shield("setting the tags"):
            chosen = list(dict.fromkeys(map(str, (tags,) if isinstance(tags, str) else tags)))
            check_registration({**self._registration, "tags": chosen})
            if not self._is_over("tags"):
                # Else other ranks, who say again how they began, would undo it.
                self._registration["replace_tags"] = True
                self._describe("tags", chosen)

    def _add_entries(self, kind: str, new: Mapping[str, Any]) -> None:
        with self.guard.shield(f"setting the {kind}"):
            if not self._is_over(kind):
                self._describe(kind, {**self._registration.get(kind, {}), **plain_entries(new)})

    def _is_over(self, kind: str) -> bool:
        if self.finished:
            self.guard.tell_once(kind, "run.%s: the run is finished; what is set now is not recorded.", kind)
        return self.finished

    def detach(self) -> None:
        """Undo `fp8scope.attach`: steps are no longer found by themselves. The run goes on."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.end()

    def log_eval(
        self,
        name: str,
        metric: str,
        items: Any,
        *,
        kind: str = "proportion",
        step: int | None = None,
        higher_is_better: bool = True,
        item_ids: Sequence[str] | None = None,
        clusters: Sequence[str] | None = None,
    ) -> None:
        """Record an evaluation's score of every item, so that its interval can be computed.

        `items`: a sequence, array or tensor of numbers; 0 or 1 for `kind="proportion"`, anything finite for
        `"mean"`. `step` defaults to the last one. `item_ids` pair the items with those of other runs;
        `clusters` name items that belong together (questions on one text). An unusable evaluation is left out
        and told once.
        """
        with self.guard.shield(f"recording the evaluation {name!r}"):
            if is_tensor(items):
                items = items.detach().double().cpu().numpy()
            document = evaluation_document(
                name,
                metric,
                items,
                kind=kind,
                step=self._step if step is None else step,
                higher_is_better=higher_is_better,
                item_ids=item_ids,
                clusters=clusters,
            )
            if self._active():
                self._pipeline.put(Document(Kind.EVALUATION, lambda: dump_json(document)))

    def on_alert(self, callback: Callable[[Alert], object]) -> None:
        """Call `callback(alert)` for every alert the server raises for this run.

        It is called by the training thread, at the end of a step or in `finish`, so it may touch the model.
        What it raises is raised there.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"on_alert needs something to call, got {callback!r}.")
        self._callbacks.append(callback)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets a run that records nothing: this one goes on recording.
        return disabled_run, (self.name,)

    # Behind the scenes

    def _before_finish(self) -> None:
        with self.guard.shield("looking at the repository"):
            self._complete_environment(LOOKUP_AT_END)
        self._end_attachment()
        with self.guard.shield("describing the run"):
            self._describe_if_due(now=True)
        self._end_controls()
        with self.guard.shield("ending the measures"):
            self._count_kernel_failures()
            self._measures.close()
            self._collector.close()

    def _after_finish(self) -> None:
        self._deliver_alerts()

    def _announce_again(self) -> None:
        self._collector.after_fork()
        self._announce_controls()

    def _end_attachment(self) -> None:
        # Alerts are delivered once the run is finished: what a callback raises must not keep it from that.
        # And that a step before was recorded well does not undo how the program ended.
        (callbacks, self._callbacks), failure = (self._callbacks, []), self._failure
        with self.guard.shield("ending the attachment"):
            self.detach()
            self._end_logged()
        self._callbacks, self._failure = callbacks, failure
        if self._early:
            names = ", ".join(sorted(map(str, self._early)))[:200]
            self.guard.tell_once(
                "early",
                "no step followed that %s could be recorded with: use `with run.step()`, or run.log(..., "
                "step=number).",
                names,
            )


def disabled_run(name: str = "") -> Run:
    """A run that records nothing."""
    return Run(Settings(mode="disabled"), blank_registration(name))
