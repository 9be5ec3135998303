"""One optimizer step, as the training script sees it."""

import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fp8scope.observe.collector import host_number, is_tensor, tensor_number

if TYPE_CHECKING:
    import torch

    from fp8scope.guard import Guard
    from fp8scope.observe.snapshot import PlainSnapshot, Snapshot
    from fp8scope.observe.timing import Reading
    from fp8scope.run import Run

SCALAR_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
MAX_SCALARS = 1900
"""The server takes 2000 a step; the agent adds a few of its own."""


def as_mapping(guard: "Guard", scalars: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Both together; what is no mapping is left out, and counted."""
    if scalars is None:
        return named
    with guard.shield("logging"):
        if not isinstance(scalars, Mapping):
            raise TypeError(
                f"log takes names and values, log(loss=1.0) or log({{'loss': 1.0}}), got {scalars!r}"
            )
        return {**scalars, **named}
    return named


class Step:
    """One optimizer step; made by `Run.step`."""

    # As a step begins; here, since to set them is the training's time.
    _began = _ended = 0.0
    _ended_at = 0
    _reading: "Reading | None" = None
    _taken: "Snapshot | PlainSnapshot | None" = None
    _is_taken = False

    def __init__(self, run: "Run", number: int, tokens: int) -> None:
        self.number = number
        self._run = run
        self._tokens = tokens
        self._scalars: dict[str, float] = {}
        self._device_scalars: dict[str, torch.Tensor] = {}

    @property
    def seconds(self) -> float:
        """From its beginning to its end, of a step that has ended."""
        return self._ended - self._began

    @property
    def tokens(self) -> int:
        """The tokens that this step trains on, as far as they were told."""
        return self._tokens

    def count_tokens(self, tokens: int) -> None:
        """This step trains on so many tokens more."""
        self._tokens += tokens

    def stop_clock(self, began: float = 0.0) -> None:
        """The step's work is done: its times end here. Values can be logged until the block is left.

        `began`: when it began (`time.perf_counter`), of a step without a block.
        """
        if not self._ended:
            if began:
                self._began = began
            self._ended, self._ended_at = time.perf_counter(), time.time_ns() // 1000
            self._run._measure_step(self)

    def take(self, snapshot: "Snapshot | PlainSnapshot | None") -> None:
        """What was counted in this step: what is counted from now on belongs to the next."""
        self._taken, self._is_taken = snapshot, True
        self._device_scalars = {}

    def keep_taken(self) -> None:
        """Values on a device that were logged after `take` went without them: wait for them now."""
        if self._is_taken and self._device_scalars:
            late, self._device_scalars = self._device_scalars, {}
            self._scalars |= {name: float(value.item()) for name, value in late.items()}

    def __contains__(self, name: object) -> bool:
        """Whether a value of this name was logged."""
        return name in self._scalars or name in self._device_scalars

    def log_default(self, name: str, value: Any) -> None:
        """Log a value unless the script has logged one of this name."""
        if name not in self:
            self.log({name: value})

    def log(self, scalars: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add values to this step: numbers, NumPy scalars, or tensors of one element on any device.

        A mapping's values are logged under its name: `{"train": {"loss": 1.0}}` is `train/loss`. Nothing here
        waits for a device. A name logged twice keeps its last value; a value that is no number is left out
        and told once.
        """
        run = self._run
        if not run._active():
            return
        known, held = run._known_names, self._scalars
        if scalars is not None and (named or not isinstance(scalars, dict)):
            scalars = as_mapping(run.guard, scalars, named)
        for name, value in (scalars or named).items():
            # The common case, short: this is the training's time.
            if type(value) is float and name in known and not self._device_scalars:
                held[name] = value
                continue
            try:
                self._add(name, value)
            except Exception as error:
                run.guard.caught(f"logging {name!r}", error)

    def _add(self, name: str, value: Any) -> None:
        known = self._run._known_names
        if name not in known and not isinstance(value, Mapping):
            if not SCALAR_NAME.fullmatch(name):
                raise ValueError("a name is 1 to 128 of the characters A-Z a-z 0-9 _ . / -")
            if len(known) < MAX_SCALARS:
                known.add(name)
        if len(self._scalars) + len(self._device_scalars) >= MAX_SCALARS:
            raise ValueError(f"a step holds at most {MAX_SCALARS} values")
        tensor = is_tensor(value)
        if not tensor and isinstance(value, Mapping):
            self._add_nested(name, value)
            return
        if tensor and not value.is_cpu:
            if value.numel() != 1:
                raise ValueError(
                    f"a scalar has one element, this tensor has {value.numel()}: reduce it (.mean())"
                )
            self._device_scalars[name] = value.detach()
            self._scalars.pop(name, None)
            return
        self._scalars[name] = tensor_number(value) if tensor else host_number(value)
        if self._device_scalars:
            self._device_scalars.pop(name, None)

    def _add_nested(self, name: str, values: Mapping[str, Any]) -> None:
        if len(name) > 128:
            raise ValueError("a name is 1 to 128 of the characters A-Z a-z 0-9 _ . / -")
        for key, value in values.items():
            full = f"{name}/{key}"
            try:
                self._add(full, value)
            except Exception as error:
                self._run.guard.caught(f"logging {full[:200]!r}", error)

    def __enter__(self) -> Self:
        self._run._begin_step(self)
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_clock()
        self._run._end_step(self, error)
