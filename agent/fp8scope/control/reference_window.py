"""BF16 reference windows: compare the FP8 loss with that of BF16, from the same state on the same batches.

    train_step = run.reference_window(train_step, model, optimizer, every=1000, steps=20)
    for batch in loader:
        with run.step() as step:
            step.log(loss=train_step(batch))

Every `every` calls, the next `steps` batches are trained twice:

1. The FP8 arm is the normal training, whose losses are also those of the run. The window saves the training
   state before the first batch, and for each batch its data and the random state.
2. The BF16 arm follows the last batch. It restores the saved state, switches all FP8 layers to BF16, and
   trains the same batches with the same random numbers (for example in dropout) and optimizer settings.

Then the state of the run is restored bit for bit, and the training continues.

A window costs `steps` additional steps and two copies of the state that `fp8scope.control.training_state`
lists: one from its beginning, one while the BF16 arm trains. By default they are in host memory, and take
about 2 x 16 bytes per parameter with AdamW in float32. Side effects of `train_step` (such as writing a file)
happen twice. Data is read only once, so the loader is not affected.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.config import ConfigurationError
from fp8scope.control.loss_comparison import (
    MARGIN,
    averaged_over_ranks,
    check_tolerance,
    compare,
    host_numbers,
    loss_of,
)
from fp8scope.control.precision import (
    MatchedLayers,
    Precision,
    fp8_layers_of,
    precision_of,
    set_precision,
)
from fp8scope.control.training_state import (
    RandomState,
    TrainingState,
    clone_batch,
    restore_settings,
    settings_of,
)
from fp8scope.guard import Guard
from fp8scope.recording.records import wire_number

logger = logging.getLogger("fp8scope")

Policy = Literal["report", "fallback"]
TrainStep: TypeAlias = Callable[..., Any]

MAX_STEPS = 1000
MAX_FAILURES = 3


@dataclass(slots=True)
class WindowBatch:
    """The inputs and the loss of one step of the window, to train it again."""

    arguments: Any
    random: RandomState
    settings: list[list[dict[str, Any]]]
    loss: Tensor | float | None = None


@dataclass(slots=True)
class OpenWindow:
    """An open window: the state at its beginning, and the steps since then."""

    begin: TrainingState
    first_step: int
    seconds: float
    batches: list[WindowBatch] = field(default_factory=list)


class WindowHost(Protocol):
    """The part of `fp8scope.control.controller.RunController` that a reference window uses."""

    guard: Guard
    report: Callable[..., None]
    """Sends a report: its kind, and its fields as keyword arguments."""

    @property
    def margin(self) -> float | None:
        """The project's margin; None before the server has answered."""

    @property
    def finished(self) -> bool:
        """Return whether the run has ended."""

    @property
    def step(self) -> int:
        """The number of the latest step."""

    @property
    def is_in_block(self) -> bool:
        """Return whether the script's own `with run.step()` is open."""

    def call_at_boundary(self, action: Callable[[], object]) -> None:
        """Call `action` once, at the end of the open step."""

    def switch(self, matches: MatchedLayers, precision: Precision, why: str) -> list[str]:
        """Switch layers now, and mark the switch on the run's page."""

    def unrecorded(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        """Record nothing within the block."""


class ReferenceWindow:
    """A training step with reference windows, returned by `Run.reference_window`.

    Call it instead of the script's own training step.
    """

    def __init__(
        self,
        run: WindowHost,
        train_step: TrainStep,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int,
        steps: int,
        scheduler: Any = None,
        also: Sequence[Any] = (),
        policy: Policy = "report",
        tolerance: float | None = None,
        keep_on: str = "cpu",
    ) -> None:
        self._run = run
        self._train_step = train_step
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        schedulers = [] if scheduler is None else [scheduler]
        self._also = [*schedulers, *also]
        self._every, self._steps, self._policy, self._keep_on = every, steps, policy, keep_on
        self._tolerance = check_tolerance(tolerance)
        self._check()
        self._calls = 0
        self._failures = 0
        self._inside = False
        self._fallen: list[nn.Module] = []
        """Layers that the policy has switched to BF16 until the next window."""
        self._window: OpenWindow | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one training step of the script."""
        if self._inside or self._failures >= MAX_FAILURES or self._run.finished:
            return self._train_step(*args, **kwargs)
        if self._window is not None and len(self._window.batches) == self._steps:
            # The end of the step was not signalled since the last call.
            self._close()
        self._calls += 1
        if self._window is None and self._calls > 1 and (self._calls - 1) % self._every == 0:
            self._open()
        batch = self._remember((args, kwargs))
        self._inside = True
        try:
            result = self._train_step(*args, **kwargs)
        except BaseException:
            # The window is incomplete; the script decides how the run continues.
            self._window = None
            raise
        finally:
            self._inside = False
        if batch is not None:
            self._note(batch, result)
        return result

    def _check(self) -> None:
        """Raise ConfigurationError if an argument is invalid."""
        if not callable(self._train_step):
            raise ConfigurationError("train_step must be a function that trains on one batch.")
        counts: dict[str, Any] = {"steps": self._steps, "every": self._every}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 2:
                raise ConfigurationError(f"{name} must be a whole number of at least 2, got {value!r}.")
        if not self._steps <= min(MAX_STEPS, self._every):
            raise ConfigurationError(
                f"steps must be at most {MAX_STEPS}, and at most every ({self._every}), got {self._steps}."
            )
        if self._policy not in get_args(Policy):
            raise ConfigurationError(
                f"policy must be one of {', '.join(get_args(Policy))}, got {self._policy!r}."
            )
        if self._keep_on not in ("cpu", "device"):
            raise ConfigurationError(f"keep_on must be 'cpu' or 'device', got {self._keep_on!r}.")
        for stateful in self._also:
            if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
                raise ConfigurationError(
                    f"{type(stateful).__name__} has no state_dict and load_state_dict, so it cannot be saved."
                )
        if not all(isinstance(item, Optimizer) for item in self._optimizers) or not self._optimizers:
            raise ConfigurationError("optimizer must be a torch.optim.Optimizer or a sequence of them.")

    # The FP8 arm: the normal training

    def _open(self) -> None:
        """Open a window that begins with the next step."""
        with self._shielded("opening a reference window"):
            self._come_back()
            if not self._layers():
                self._run.guard.warn_once("reference", "no reference window: the model has no layer in FP8.")
                return
            began = time.perf_counter()
            begin = TrainingState(self._model, self._optimizers, self._also, keep_on=self._keep_on)
            self._window = OpenWindow(begin, self._run.step, time.perf_counter() - began)
            if self._calls - 1 == self._every:
                size = 2 * begin.nbytes / 2**20
                logger.info("a reference window holds up to %.0f MiB of copies (%s).", size, self._keep_on)

    def _remember(self, arguments: Any) -> WindowBatch | None:
        if self._window is None:
            return None
        with self._shielded("keeping a batch"):
            settings = [settings_of(optimizer) for optimizer in self._optimizers]
            return WindowBatch(clone_batch(arguments), RandomState([self._model]), settings)
        self._window = None
        return None

    def _note(self, batch: WindowBatch, result: Any) -> None:
        window = self._window
        if window is None:
            return
        if not window.batches:
            # If the forward pass opens the step, its number is known only now.
            window.first_step = self._run.step
        with self._shielded("reading the loss of a training step"):
            batch.loss = loss_of(result)
            window.batches.append(batch)
        if batch.loss is None:
            self._window = None
        elif len(window.batches) == self._steps:
            if self._run.is_in_block:
                self._run.call_at_boundary(self._close)
            else:
                self._close()

    # The BF16 arm

    def _close(self) -> None:
        """Train the window's batches in BF16, restore the state of the run, and compare the arms."""
        window, self._window = self._window, None
        if window is None or len(window.batches) < self._steps or self._run.finished:
            return
        with self._shielded("a reference window"):
            began = time.perf_counter()
            layers = self._layers()
            bf16, kept_bytes = self._train_in_bf16(window, layers)
            fp8 = host_numbers(batch.loss for batch in window.batches)
            fp8, bf16 = averaged_over_ranks(fp8, bf16, next(self._model.parameters()).device)
            seconds = window.seconds + time.perf_counter() - began
            self._conclude(window, layers, fp8, bf16, kept_bytes, seconds)

    def _train_in_bf16(
        self, window: OpenWindow, layers: Sequence[tuple[str, nn.Module]]
    ) -> tuple[list[float], int]:
        """Return the losses of the batches in BF16, and the size of the copies."""
        now = TrainingState(self._model, self._optimizers, self._also, keep_on=self._keep_on)
        configurations = [(layer, precision_of(layer)) for _, layer in layers]
        losses: list[Any] = []
        self._inside = True
        try:
            with self._run.unrecorded([self._model], self._optimizers):
                window.begin.restore()
                for _, layer in layers:
                    set_precision(layer, "bf16")
                for batch in window.batches:
                    batch.random.restore()
                    for optimizer, settings in zip(self._optimizers, batch.settings, strict=True):
                        restore_settings(optimizer, settings)
                    args, kwargs = clone_batch(batch.arguments)
                    losses.append(loss_of(self._train_step(*args, **kwargs)))
        finally:
            self._inside = False
            for layer, precision in configurations:
                set_precision(layer, precision)
            # Only after the switch back to FP8, which resets the scales that this restores.
            now.restore()
        return host_numbers(losses), now.nbytes + window.begin.nbytes

    def _conclude(
        self,
        window: OpenWindow,
        layers: Sequence[tuple[str, nn.Module]],
        fp8: Sequence[float],
        bf16: Sequence[float],
        kept_bytes: int,
        seconds: float,
    ) -> None:
        run = self._run
        tolerance = self._tolerance or run.margin or MARGIN
        verdict = compare(fp8, bf16, tolerance)
        # FP8 is not the cause of a loss that is non-finite in BF16 too, and a lower loss is fine.
        worse = all(map(math.isfinite, bf16)) and not verdict.delta <= tolerance
        action = "fallback" if self._policy == "fallback" and worse else ""
        run.report(
            "reference",
            step=window.first_step,
            fp8=[wire_number(loss) for loss in fp8],
            bf16=[wire_number(loss) for loss in bf16],
            delta=wire_number(verdict.delta),
            noise=wire_number(verdict.noise),
            tolerance=tolerance,
            verdict="within" if verdict.within else "over",
            policy=self._policy,
            action=action,
            layers=len(layers),
            kept_bytes=kept_bytes,
            seconds=round(seconds, 3),
        )  # fmt: skip
        if action:
            why = f"reference window from step {window.first_step}: loss {verdict.delta:+.2%} against BF16"
            run.switch(MatchedLayers(tuple(layers)), "bf16", why)
            self._fallen = [layer for _, layer in layers]

    def _come_back(self) -> None:
        """Switch the layers that the policy took to BF16 back to FP8."""
        fallen, self._fallen = self._fallen, []
        back = tuple((path, layer) for path, layer in fp8_layers_of(self._model) if layer in fallen)
        if back:
            self._run.switch(MatchedLayers(back), "fp8", "the next reference window begins")

    def _layers(self) -> list[tuple[str, nn.Module]]:
        return [(path, layer) for path, layer in fp8_layers_of(self._model) if precision_of(layer) == "fp8"]

    @contextmanager
    def _shielded(self, what: str) -> Iterator[None]:
        """Catch a failure of the window, and count it; after MAX_FAILURES there are no more windows."""
        try:
            yield
        except Exception as error:
            self._window = None
            self._failures += 1
            self._run.guard.error(what, f"{type(error).__name__}: {error}", error)
