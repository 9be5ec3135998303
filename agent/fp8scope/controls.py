"""What a run does besides recording: take commands, change precision, compare with BF16, find the bad
product.

A part of `Run`, kept apart from recording.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8scope.commands import (
    PAUSE_SECONDS,
    Callback,
    Command,
    Desk,
    RefusedError,
    State,
    check_allowed,
    check_pause,
)
from fp8scope.config import ConfigurationError
from fp8scope.entries import Entry
from fp8scope.environment import clean
from fp8scope.records import Kind, dump_json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fp8scope.bisect import Bisection, LossFunction
    from fp8scope.fallback import Found, Layers, Pattern, Precision
    from fp8scope.guard import Guard
    from fp8scope.pipeline import Pipeline
    from fp8scope.reference import Policy, TrainStep
    from fp8scope.step import Step

MAX_TEXT = 500
MAX_LAYERS_NAMED = 500
MAX_PATTERNS = 100


class Controls:
    """Mixed into `Run`, which provides what is declared here."""

    guard: "Guard"
    _pipeline: "Pipeline"
    _step: int
    _open: "Step | None"
    _attachment: Any
    _forked: bool
    _quiet = False
    """Nothing that happens now is to be recorded."""

    if TYPE_CHECKING:

        @property
        def finished(self) -> bool: ...

        def _active(self) -> bool: ...

    def _init_controls(self, commands: Sequence[str] | None = None) -> None:
        self._desk = Desk(
            check_allowed(commands), self._answer_command, self._fall_back_as_asked, self._listen
        )
        self._layers: Layers | None = None
        self._switches: list[tuple[Found, Precision, str]] = []
        self._accepted: list[str] = []
        self._accepts_changed = True
        self._at_boundary: list[Callable[[], object]] = []

    # For the training script

    def on_command(self, name: str, callback: Callback) -> None:
        """Have `callback(command)` called when somebody asks for `name` on the run's page, e.g. "checkpoint".

        It is called by the training thread at the end of a step, so it may touch model and optimizer. What it
        returns, if a text, is shown as the result; what it raises is shown, and raised there. Raises
        TypeError or ConfigurationError at once for a callback or a name that cannot be used.
        """
        self._desk.handle(name, callback)
        self._accepts_changed = True

    def allow_pause(self, seconds: float = PAUSE_SECONDS) -> None:
        """Let people hold the training between two steps, `seconds` at a time at most (3600 at most).

        With several ranks that wait for each other it must be less than the timeout of their collectives.
        """
        self._desk.most_pause = check_pause(seconds)
        self._accepts_changed = True

    def fallback(
        self, pattern: "Pattern | Sequence[Pattern]", precision: "Precision" = "bf16", why: str = ""
    ) -> tuple[str, ...]:
        """Compute the watched layers that `pattern` matches in BF16 (or, `precision="fp8"`, in FP8 again).

        `pattern`: a glob over module paths such as `blocks.*.mlp.down`, a compiled regular expression, or
        several. It takes effect at the next step boundary (in a callback of `on_alert` or `on_command`: now),
        on the training thread, and is recorded on the run's page with `why`. Returns the paths of the layers.
        What cannot be switched (Transformer Engine, FP8 gathered by FSDP) is told. CUDA graphs that were
        captured before go on as they are. Scales begin afresh when a layer comes back.
        """
        with self.guard.shield("falling back"):
            if precision not in ("bf16", "fp8"):
                raise ValueError(f"precision must be 'bf16' or 'fp8', got {precision!r}")
            found = self._find_layers(pattern)
            if found.layers:
                self._switches.append((found, precision, str(why)))
            return found.paths
        return ()

    def annotate(self, text: str, why: str = "", name: str = "note") -> None:
        """Put a mark into the run's loss chart at the current step: what was done, and why."""
        self._tell("annotation", name=name, text=_text(text) or "-", why=_text(why), layers=[])

    def reference_window(
        self,
        train_step: "TrainStep",
        model: "nn.Module",
        optimizer: "Optimizer | Sequence[Optimizer]",
        *,
        every: int,
        steps: int,
        scheduler: Any = None,
        also: Sequence[Any] = (),
        policy: "Policy" = "report",
        tolerance: float | None = None,
        keep_on: str = "cpu",
    ) -> "TrainStep":
        """Now and then train the same batches in BF16 as well, compare, and go on as if nothing had been.

        Returns a function to call in the place of `train_step`, which makes one whole step of a batch
        (forward, backward, optimizer) and returns the loss; see `fp8scope.reference`. Raises
        ConfigurationError on arguments that cannot be meant.
        """
        if not self._active():
            return train_step
        from fp8scope.reference import ReferenceWindow

        return ReferenceWindow(
            self, train_step, model, optimizer,
            every=every, steps=steps, scheduler=scheduler, also=also,
            policy=policy, tolerance=tolerance, keep_on=keep_on,
        )  # fmt: skip

    def bisect(self, batch: Any, loss_fn: "LossFunction", model: "nn.Module | None" = None) -> "Bisection":
        """Which matrix product hurts? Gradients of one batch with each in FP8 by itself, against all-BF16.

        `loss_fn(batch)` computes the loss with the watched model (or `model`), without calling backward.
        Takes 3 passes forward and backward for every FP8 layer, and memory for two more sets of gradients;
        model, gradients, random state and scales are as before afterwards. Call it between two steps. Returns
        the ranking, and shows it on the run's page. Raises ValueError where there is no FP8 layer, and what
        `loss_fn` raises.
        """
        from fp8scope.bisect import bisect

        models = [model] if model is not None else self._layers.models if self._layers is not None else []
        with self._quietly(models):
            found = bisect(models, lambda: loss_fn(batch))
        with self.guard.shield("reporting a bisection"):
            self._tell("bisect", **found.document())
        return found

    # For the run

    @property
    def margin(self) -> float | None:
        """The project's margin: relative differences of the loss up to it count as none. Known once the
        server has answered.
        """
        sender = self._pipeline.sender
        return sender.margin if sender is not None else None

    def _watch_layers(self, model: "nn.Module") -> None:
        """Let this model's layers fall back."""
        from fp8scope.fallback import Layers

        if self._layers is None:
            self._layers = Layers()
        self._layers.watch(model)
        self._accepts_changed = True

    def _take_commands(self, found: Sequence[Mapping[str, Any]]) -> None:
        self._desk.take(found)

    def _boundary(self) -> None:
        """Between two steps, on the training thread: do what waits for this moment."""
        if self._quiet or self._forked or not self._active():
            return
        if self._accepts_changed:
            self._tell_accepted()
        self._switch_layers()
        while self._at_boundary:
            self._at_boundary.pop(0)()
        self._desk.work()
        # What a command's callback, or a comparison with BF16, has asked for.
        self._switch_layers()

    def _announce_controls(self) -> None:
        """Another writer begins: it has to say anew what is taken."""
        self._accepted, self._accepts_changed = [], True

    def _end_controls(self) -> None:
        """The run ends: nobody waits for what was not done."""
        with self.guard.shield("answering commands"):
            self._desk.refuse_all("The run has ended.")

    @contextmanager
    def _quietly(
        self, models: "Sequence[nn.Module]", optimizers: "Sequence[Optimizer]" = ()
    ) -> "Iterator[None]":
        """Within it nothing is recorded: not the steps, not the tensors, not the times."""
        from fp8scope.quiet import without_hooks

        before = self._step, self._open
        self._quiet = True
        try:
            with without_hooks(models, optimizers):
                yield
        finally:
            self._quiet = False
            self._step, self._open = before

    def _find_layers(self, pattern: "Pattern | Sequence[Pattern]") -> "Found":
        from fp8scope.fallback import Found

        found = Found() if self._layers is None else self._layers.find(pattern)
        for problem in found.problems[:3]:
            self.guard.tell_once(f"fallback {problem}", "cannot change the precision of %s.", problem)
        if not found.layers:
            self.guard.tell_once(
                f"fallback nothing {pattern!r}", "fallback(%r) matches no watched FP8 layer.", pattern
            )
        return found

    def _switch_layers(self) -> None:
        """What was asked for by `fallback` takes effect: a step is over, or about to begin."""
        if not self._switches or self._quiet:
            return
        with self.guard.shield("falling back"):
            while self._switches:
                found, precision, why = self._switches.pop(0)
                self._switch(found, precision, why)

    def _switch(
        self, found: "Found", precision: "Precision", why: str, *, only_fallen: bool = False
    ) -> list[str]:
        """Switch layers now, and record it."""
        assert self._layers is not None
        changed = self._layers.switch(found, precision, only_fallen=only_fallen)
        if changed:
            count = f"{len(changed)} layer{'' if len(changed) == 1 else 's'}"
            text = (
                f"{count} to {precision.upper()}: {', '.join(changed[:3])}{', …' if len(changed) > 3 else ''}"
            )
            self._tell(
                "annotation",
                name="fallback",
                text=_text(text),
                why=_text(why),
                layers=changed[:MAX_LAYERS_NAMED],
            )
        return changed

    def _fall_back_as_asked(self, command: Command) -> str:
        """The command `fallback`. Its patterns are globs: a regular expression may take for ever."""
        patterns, precision = command.arguments.get("patterns"), command.arguments.get("precision", "bf16")
        if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
            raise RefusedError("The command names no layers.")
        if precision not in ("bf16", "fp8"):
            raise RefusedError(f"There is no precision {str(precision)[:20]!r} to change to.")
        if self._layers is None:
            raise RefusedError("No model is watched: run.watch(model).")
        found = self._layers.find([pattern[:512] for pattern in patterns[:MAX_PATTERNS]])
        problems = "; ".join(found.problems[:3])
        if not found.layers:
            raise RefusedError(problems or "No watched FP8 layer has such a name.")
        why = f"{command.given_by or 'somebody'}: {command.reason}".rstrip(": ")
        changed = self._switch(found, precision, why, only_fallen=True)
        if not changed and precision == "fp8":
            raise RefusedError("None of these layers has fallen back.")
        said = f"{len(changed)} of {len(found.layers)} layers changed to {precision.upper()}."
        return f"{said} Not: {problems}" if problems else said

    def _tell_accepted(self) -> None:
        self._accepts_changed = False
        with self.guard.shield("telling which commands are taken"):
            accepted = self._desk.accepts(bool(self._layers))
            if accepted != self._accepted:
                self._accepted = accepted
                self._tell("accepts", accepts=accepted)

    def _listen(self, listening: bool) -> None:
        """Somebody may ask for the end of a pause at any moment."""
        sender = self._pipeline.sender
        if sender is not None:
            sender.listening = listening

    def _answer_command(self, command: Command, state: State, message: str) -> None:
        with self.guard.shield("answering a command"):
            self._tell("command", command=command.id, state=state, message=_text(message))

    def _tell(self, kind: str, **fields: Any) -> None:
        """Have the server told, once, whatever becomes of the connection."""
        with self.guard.shield(f"reporting ({kind})"):
            document = {"kind": kind, "step": self._step, **fields}
            if self._active():
                self._pipeline.put(Entry(Kind.REPORT, lambda: dump_json(document)))


def wire_number(value: float) -> float | str:
    """A number as JSON can carry it: what is not finite, as docs/wire.md writes it."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def check_positive(name: str, value: Any) -> float:
    """`value`. Raises ConfigurationError unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"{name} must be a number above 0, got {value!r}.")
    return float(value)


def _text(text: object) -> str:
    return clean(str(text))[:MAX_TEXT]
