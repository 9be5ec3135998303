"""One optimizer step, as the training script sees it."""

import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from fp8scope.guard import Guard
from fp8scope.scalars import host_number, is_tensor, tensor_number

if TYPE_CHECKING:
    import torch

    from fp8scope.observe.snapshot import PlainSnapshot, Snapshot
    from fp8scope.observe.timing import StepMeasurements

SCALAR_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
MAX_NAME = 128
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./-]+")
NAME_RULE = f"a name is 1 to {MAX_NAME} of the characters A-Z a-z 0-9 _ . / -"
MAX_SCALARS = 1900
"""The server takes 2000 values a step; the agent adds a few of its own."""


def valid_name(name: object) -> str:
    """Return the name with what the server does not take replaced by `_`, and cut at MAX_NAME."""
    text = str(name)[: 4 * MAX_NAME]
    return text if SCALAR_NAME.fullmatch(text) else (_NOT_IN_A_NAME.sub("_", text)[:MAX_NAME] or "_")


class StepIsFullError(ValueError):
    """A step has as many values as the server takes."""


def _failed_to_log(name: object, error: Exception) -> str:
    # One warning for a full step, not one for each name that it has no room for.
    return "logging more values" if isinstance(error, StepIsFullError) else f"logging {name!r:.200}"


def as_mapping(guard: Guard, scalars: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Merge both arguments of `log`. A `scalars` that is not a mapping counts as an error."""
    if scalars is None:
        return named
    with guard.shield("logging"):
        if not isinstance(scalars, Mapping):
            raise TypeError(
                f"log takes names and values, log(loss=1.0) or log({{'loss': 1.0}}), got {scalars!r}"
            )
        return {**scalars, **named}
    return named


class StepOwner(Protocol):
    """Measures and records the steps that it makes: `fp8scope.session.steps.Steps`."""

    guard: Guard
    active: bool
    """True if anything is being recorded."""
    known_names: set[str]
    """Names of scalars that were checked before."""

    def begin_step(self, step: "Step") -> None:
        """A step begins."""

    def measure_step(self, step: "Step") -> None:
        """The work of the step is done; take its times."""

    def end_step(self, step: "Step", error: BaseException | None) -> None:
        """The step's block was left; record it."""


class Step:
    """One optimizer step; made by `Run.step`.

    Scripts use `number`, `tokens`, `seconds` and `log`; the other attributes belong to the agent.
    """

    # Defaults of the class, because setting them on each step would take time from the training.
    began = ended = 0.0
    ended_at = 0
    """The end of the step, in microseconds since 1970 (UTC)."""
    reading: "StepMeasurements | None" = None
    """Times, memory and other scalars that were measured in this step."""
    taken: "Snapshot | PlainSnapshot | None" = None
    is_taken = False
    """True if `taken` is the step's snapshot, so that no other may be taken."""

    def __init__(self, owner: StepOwner, number: int, tokens: int) -> None:
        self.number = number
        self.tokens = tokens
        """The tokens that this step trains on, as far as they are known."""
        self.scalars: dict[str, float] = {}
        self.device_scalars: dict[str, torch.Tensor] = {}
        self._owner = owner

    @property
    def seconds(self) -> float:
        """The duration of a step that has ended."""
        return self.ended - self.began

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens that this step trains on."""
        self.tokens += tokens

    def stop_clock(self, began: float = 0.0) -> None:
        """Take the step's times now. Values can still be logged until the block is left.

        `began`: the start (`time.perf_counter`) of a step that has no block.
        """
        if not self.ended:
            if began:
                self.began = began
            self.ended, self.ended_at = time.perf_counter(), time.time_ns() // 1000
            self._owner.measure_step(self)

    def take(self, snapshot: "Snapshot | PlainSnapshot | None") -> None:
        """Set the step's snapshot; what the layers count after it belongs to the next step."""
        self.taken, self.is_taken = snapshot, True
        self.device_scalars = {}

    def read_late_scalars(self) -> None:
        """Read device values that were logged after `take`; waits for the device."""
        if self.is_taken and self.device_scalars:
            late, self.device_scalars = self.device_scalars, {}
            self.scalars |= {name: float(value.item()) for name, value in late.items()}

    def __contains__(self, name: object) -> bool:
        """Return whether a value of this name was logged."""
        return name in self.scalars or name in self.device_scalars

    def log_default(self, name: str, value: Any) -> None:
        """Log a value unless the script has logged one of this name."""
        if name not in self:
            self.log({name: value})

    def log(self, scalars: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add values to this step: numbers, NumPy scalars, or tensors of one element on any device.

        Values of a nested mapping are logged under its name: `{"train": {"loss": 1.0}}` is `train/loss`.
        Logging never waits for a device. A name that is logged twice keeps its last value. A value that is
        not a number is left out, with one warning.
        """
        owner = self._owner
        if not owner.active:
            return
        names, own = owner.known_names, self.scalars
        if scalars is not None and (named or not isinstance(scalars, dict)):
            scalars = as_mapping(owner.guard, scalars, named)
        for name, value in (scalars or named).items():
            # The common case, kept short because it runs in the training's time.
            if type(value) is float and name in names and not self.device_scalars:
                own[name] = value
                continue
            try:
                self._add(name, value)
            except Exception as error:
                owner.guard.caught(_failed_to_log(name, error), error)

    def _add(self, name: str, value: Any) -> None:
        names = self._owner.known_names
        if name not in names and not isinstance(value, Mapping):
            if not SCALAR_NAME.fullmatch(name):
                raise ValueError(NAME_RULE)
            if len(names) < MAX_SCALARS:
                names.add(name)
        if len(self.scalars) + len(self.device_scalars) >= MAX_SCALARS and name not in self:
            raise StepIsFullError(f"a step holds at most {MAX_SCALARS} values")
        tensor = is_tensor(value)
        if not tensor and isinstance(value, Mapping):
            self._add_nested(name, value)
            return
        if tensor and not value.is_cpu:
            if value.numel() != 1:
                raise ValueError(
                    f"a scalar has one element, this tensor has {value.numel()}: reduce it (.mean())"
                )
            self.device_scalars[name] = value.detach()
            self.scalars.pop(name, None)
            return
        self.scalars[name] = tensor_number(value) if tensor else host_number(value)
        if self.device_scalars:
            self.device_scalars.pop(name, None)

    def _add_nested(self, name: str, values: Mapping[str, Any]) -> None:
        if len(name) > MAX_NAME:
            raise ValueError(NAME_RULE)
        for key, value in values.items():
            full = f"{name}/{key}"
            try:
                self._add(full, value)
            except Exception as error:
                self._owner.guard.caught(_failed_to_log(full, error), error)

    def __enter__(self) -> Self:
        self._owner.begin_step(self)
        self.began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_clock()
        self._owner.end_step(self, error)
