"""What a run does besides recording: take commands, change precision, compare with BF16, find the bad
product.

A part of `Run`, kept apart from recording.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8scope.control.command_queue import (
    PAUSE_SECONDS,
    Callback,
    Command,
    Desk,
    State,
    check_allowed,
    check_pause,
)
from fp8scope.control.switching import Switching
from fp8scope.metadata.redaction import clean
from fp8scope.recording.entries import Document
from fp8scope.recording.records import Kind, dump_json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fp8scope.control.bisection import Bisection, LossFunction
    from fp8scope.control.reference_window import Policy, TrainStep
    from fp8scope.guard import Guard
    from fp8scope.session.pipeline import Pipeline
    from fp8scope.step import Step

MAX_TEXT = 500


class Controls(Switching):
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
        self._init_switching()
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

    def annotate(self, text: str, why: str = "", name: str = "note") -> None:
        """Put a mark into the run's loss chart at the current step: what was done, and why."""
        self._mark(name, text, why, [])

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
        (forward, backward, optimizer) and returns the loss; see `fp8scope.control.reference_window`. Raises
        ConfigurationError on arguments that cannot be meant.
        """
        if not self._active():
            return train_step
        from fp8scope.control.reference_window import ReferenceWindow

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
        from fp8scope.control.bisection import bisect

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
        super()._watch_layers(model)
        self._accepts_changed = True

    def _take_commands(self, found: Sequence[Mapping[str, Any]]) -> None:
        self._desk.take(found)

    def _boundary(self) -> None:
        """Between two steps, on the training thread: do what waits for this moment."""
        if not (self._accepts_changed or self._switches or self._at_boundary or self._desk.waiting):
            return
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
        from fp8scope.control.suspended_hooks import without_hooks

        before = self._step, self._open
        self._quiet = True
        try:
            with without_hooks(models, optimizers):
                yield
        finally:
            self._quiet = False
            self._step, self._open = before

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

    def _mark(self, name: str, text: str, why: str, layers: Sequence[str]) -> None:
        self._tell("annotation", name=name, text=_text(text) or "-", why=_text(why), layers=layers)

    def _tell(self, kind: str, **fields: Any) -> None:
        """Have the server told, once, whatever becomes of the connection."""
        with self.guard.shield(f"reporting ({kind})"):
            document = {"kind": kind, "step": self._step, **fields}
            if self._active():
                self._pipeline.put(Document(Kind.REPORT, lambda: dump_json(document)))


def _text(text: object) -> str:
    return clean(str(text))[:MAX_TEXT]
