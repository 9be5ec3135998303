"""The influence of a run on the training: commands, precision fallback, comparison with BF16, bisection.

A layer's precision changes between two steps, and each change is marked on the run's page. The script asks
for it (`Run.fallback`), or a person or a rule (the command `fallback`), or a reference window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8scope.control.command_queue import (
    Callback,
    Command,
    CommandQueue,
    CommandState,
    RefusedError,
    check_allowed,
    check_pause,
)
from fp8scope.metadata.redaction import clean
from fp8scope.recording.artefacts import address_in
from fp8scope.session.session import Session

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fp8scope.control.bisection import Bisection, LossFunction
    from fp8scope.control.precision import MatchedLayers, Pattern, Precision, WatchedLayers
    from fp8scope.control.reference_window import TrainStep

MAX_TEXT = 500
MAX_LAYERS_NAMED = 500
MAX_PATTERNS = 100
MAX_PATTERN = 512
MAX_PROBLEMS = 3


class RunController:
    """Acts on the training between two steps. Only the training thread uses it, except `take_commands`."""

    def __init__(self, session: Session, allowed: Sequence[str] | None = None) -> None:
        self.guard = session.guard
        self.report = session.send_report
        self.commands = CommandQueue(
            check_allowed(allowed), self._answer_command, self._run_fallback_command, self._listen
        )
        self.switches: list[tuple[MatchedLayers, Precision, str]] = []
        """Changes of precision that wait for the next boundary."""
        self._session = session
        self._layers: WatchedLayers | None = None
        self._accepted: list[str] = []
        """The commands that the server knows of."""
        self._accepts_changed = True
        self._at_boundary: list[Callable[[], object]] = []

    # Between two steps

    def at_boundary(self) -> None:
        """A step has ended: do what waits for this moment."""
        if not (self._accepts_changed or self.switches or self._at_boundary or self.commands.waiting):
            return
        if self._session.writers.forked or not self._session.active:
            return
        if self._accepts_changed:
            self._announce_accepted()
        self.switch_layers()
        while self._at_boundary:
            self._at_boundary.pop(0)()
        self.commands.work()
        # A command's callback, or a comparison with BF16, may have asked for changes.
        self.switch_layers()

    def call_at_boundary(self, action: Callable[[], object]) -> None:
        """Call `action` once, when the open step has ended."""
        self._at_boundary.append(action)

    def end(self) -> None:
        """The run ends: refuse the commands that wait."""
        with self.guard.shield("answering commands"):
            self.commands.refuse_all("The run has ended.")

    # Commands

    def take_commands(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Keep the commands of an answer until the step ends. Called on the sender's thread."""
        self.commands.take(documents)

    def on_command(self, name: str, callback: Callback) -> None:
        """See `Run.on_command`."""
        self.commands.handle(name, callback)
        self._accepts_changed = True

    def allow_pause(self, seconds: float) -> None:
        """See `Run.allow_pause`."""
        self.commands.longest_pause = check_pause(seconds)
        self._accepts_changed = True

    def announce_again(self) -> None:
        """Another writer begins: tell the server again which commands are accepted."""
        self._accepted, self._accepts_changed = [], True

    def _announce_accepted(self) -> None:
        self._accepts_changed = False
        with self.guard.shield("telling which commands are taken"):
            accepted = self.commands.accepts(bool(self._layers))
            if accepted != self._accepted:
                self._accepted = accepted
                self.report("accepts", accepts=accepted)

    def _answer_command(self, command: Command, state: CommandState, message: str) -> None:
        with self.guard.shield("answering a command"):
            self.report("command", command=command.id, state=state, message=_text(message))
            if command.kind == "checkpoint" and state == "done" and (address := address_in(message)):
                name = f"Checkpoint at step {self._session.step}"
                self.link({"name": name, "address": address}, self._session.step)

    def _listen(self, listening: bool) -> None:
        """Ask the server often, or not: during a pause somebody may end it at any moment."""
        sender = self._session.writers.sender
        if sender is not None:
            sender.listening = listening

    def _run_fallback_command(self, command: Command) -> str:
        """The command `fallback`. Its patterns are globs, since a regular expression may run for ever."""
        patterns, precision = command.arguments.get("patterns"), command.arguments.get("precision", "bf16")
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise RefusedError("The command names no layers.")
        if precision not in ("bf16", "fp8"):
            raise RefusedError(f"There is no precision {str(precision)[:20]!r} to change to.")
        if self._layers is None:
            raise RefusedError("No model is watched: run.watch(model).")
        matches = self._layers.find([pattern[:MAX_PATTERN] for pattern in patterns[:MAX_PATTERNS]])
        problems = "; ".join(matches.problems[:MAX_PROBLEMS])
        if not matches.layers:
            raise RefusedError(problems or "No watched FP8 layer has such a name.")
        why = f"{command.given_by or 'somebody'}: {command.reason}".rstrip(": ")
        changed = self.switch(matches, precision, why, only_fallen=True)
        if not changed and precision == "fp8":
            raise RefusedError("None of these layers has fallen back.")
        result = f"{len(changed)} of {len(matches.layers)} layers changed to {precision.upper()}."
        return f"{result} Not: {problems}" if problems else result

    # Precision

    def watch(self, model: "nn.Module") -> None:
        """Let this model's layers fall back."""
        # Needs torch.
        from fp8scope.control.precision import WatchedLayers

        if self._layers is None:
            self._layers = WatchedLayers()
        self._layers.watch(model)
        self._accepts_changed = True

    def fallback(
        self, pattern: "Pattern | Sequence[Pattern]", precision: "Precision", why: str
    ) -> tuple[str, ...]:
        """See `Run.fallback`."""
        with self.guard.shield("falling back"):
            if precision not in ("bf16", "fp8"):
                raise ValueError(f"precision must be 'bf16' or 'fp8', got {precision!r}")
            matches = self._find_layers(pattern)
            if matches.layers:
                self.switches.append((matches, precision, str(why)))
            return matches.paths
        return ()

    def _find_layers(self, pattern: "Pattern | Sequence[Pattern]") -> "MatchedLayers":
        # Needs torch.
        from fp8scope.control.precision import MatchedLayers

        matches = MatchedLayers() if self._layers is None else self._layers.find(pattern)
        for problem in matches.problems[:MAX_PROBLEMS]:
            self.guard.warn_once(f"fallback {problem}", "cannot change the precision of %s.", problem)
        if not matches.layers:
            self.guard.warn_once(
                f"fallback nothing {pattern!r}", "fallback(%r) matches no watched FP8 layer.", pattern
            )
        return matches

    def switch_layers(self) -> None:
        """Make the changes in `switches`: a step has ended, or is about to begin."""
        if not self.switches or self._session.steps.suspended:
            return
        with self.guard.shield("falling back"):
            while self.switches:
                self.switch(*self.switches.pop(0))

    def switch(
        self, matches: "MatchedLayers", precision: "Precision", why: str, *, only_fallen: bool = False
    ) -> list[str]:
        """Switch layers now and mark it on the run's page; returns the paths of those that changed."""
        assert self._layers is not None
        changed = self._layers.switch(matches, precision, only_fallen=only_fallen)
        if changed:
            count = f"{len(changed)} layer{'' if len(changed) == 1 else 's'}"
            text = (
                f"{count} to {precision.upper()}: {', '.join(changed[:3])}{', …' if len(changed) > 3 else ''}"
            )
            self._mark("fallback", text, why, changed[:MAX_LAYERS_NAMED])
        return changed

    # Marks, comparison, bisection

    def annotate(self, text: str, why: str, name: str) -> None:
        """See `Run.annotate`."""
        self._mark(name, text, why, [])

    def link(self, artefact: Mapping[str, str], step: int) -> None:
        """Link an artefact. Servers that do not know artefacts store it as a note at the step."""
        text = f"{artefact['name']}: {artefact['address']}"
        self.report("annotation", name="artefact", text=_text(text), step=step, artefact=dict(artefact))

    def _mark(self, name: str, text: str, why: str, layers: Sequence[str]) -> None:
        self.report("annotation", name=name, text=_text(text) or "-", why=_text(why), layers=layers)

    @property
    def margin(self) -> float | None:
        """See `Run.margin`."""
        sender = self._session.writers.sender
        return sender.margin if sender is not None else None

    @property
    def finished(self) -> bool:
        """Return whether the run has ended."""
        return self._session.report is not None

    @property
    def step(self) -> int:
        """The number of the step that was begun last."""
        return self._session.step

    @property
    def is_in_block(self) -> bool:
        """Return whether the script's own `with run.step()` is open."""
        return self._session.steps.open is not None and self._session.follower is None

    def reference_window(self, train_step: "TrainStep", *arguments: Any, **options: Any) -> "TrainStep":
        """See `Run.reference_window`."""
        if not self._session.active:
            return train_step
        # Needs torch.
        from fp8scope.control.reference_window import ReferenceWindow

        return ReferenceWindow(self, train_step, *arguments, **options)

    def bisect(self, batch: Any, loss_fn: "LossFunction", model: "nn.Module | None") -> "Bisection":
        """See `Run.bisect`."""
        # Needs torch.
        from fp8scope.control.bisection import bisect

        models = [model] if model is not None else self._layers.models if self._layers is not None else []
        with self.unrecorded(models):
            ranking = bisect(models, lambda: loss_fn(batch))
        with self.guard.shield("reporting a bisection"):
            self.report("bisect", **ranking.document())
        return ranking

    @contextmanager
    def unrecorded(
        self, models: "Sequence[nn.Module]", optimizers: "Sequence[Optimizer]" = ()
    ) -> "Iterator[None]":
        """Record nothing within the block: no steps, no tensors, no times."""
        # Needs torch.
        from fp8scope.control.suspended_hooks import without_hooks

        with self._session.steps.suspend(), without_hooks(models, optimizers):
            yield


def _text(text: object) -> str:
    return clean(str(text))[:MAX_TEXT]
