"""One optimizer step, as the training script sees it."""

import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fp8scope.collector import host_number, is_tensor

if TYPE_CHECKING:
    import torch

    from fp8scope.measures import Reading
    from fp8scope.run import Run

SCALAR_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
MAX_SCALARS = 1900
"""The server takes 2000 a step; the agent adds a few of its own."""


class Step:
    """One optimizer step; made by `Run.step`."""

    __slots__ = (
        "_began", "_device_scalars", "_ended", "_ended_at", "_reading", "_run", "_scalars", "_tokens",
        "number",
    )  # fmt: skip

    def __init__(self, run: "Run", number: int, tokens: int) -> None:
        self.number = number
        self._run = run
        self._tokens = tokens
        self._scalars: dict[str, float] = {}
        self._device_scalars: dict[str, torch.Tensor] = {}
        self._began = 0.0
        self._ended = 0.0
        self._ended_at = 0
        self._reading: Reading | None = None

    @property
    def tokens(self) -> int:
        """The tokens that this step trains on, as far as they were told."""
        return self._tokens

    def count_tokens(self, tokens: int) -> None:
        """This step trains on so many tokens more."""
        self._tokens += tokens

    def stop_clock(self) -> None:
        """The step's work is done: its times end here. Values can be logged until the block is left."""
        if not self._ended:
            self._ended, self._ended_at = time.perf_counter(), time.time_ns() // 1000
            self._reading = self._run._measure_step(self)

    def __contains__(self, name: object) -> bool:
        """Whether a value of this name was logged."""
        return name in self._scalars or name in self._device_scalars

    def log_default(self, name: str, value: Any) -> None:
        """Log a value unless the script has logged one of this name."""
        if name not in self:
            self.log({name: value})

    def log(self, scalars: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add values to this step: numbers, NumPy scalars, or tensors of one element on any device.

        Nothing here waits for a device. A name logged twice keeps its last value; a value that is no number
        is left out and told once.
        """
        if not self._run._active():
            return
        known, held = self._run._known_names, self._scalars
        for name, value in ({**scalars, **named} if scalars else named).items():
            # The common case, short: this is the training's time.
            if type(value) is float and name in known and not self._device_scalars:
                held[name] = value
                continue
            try:
                self._add(name, value)
            except Exception as error:
                self._run.guard.error(f"logging {name!r}", f"{type(error).__name__}: {error}", error)

    def _add(self, name: str, value: Any) -> None:
        known = self._run._known_names
        if name not in known:
            if not SCALAR_NAME.fullmatch(name):
                raise ValueError("a name is 1 to 128 of the characters A-Z a-z 0-9 _ . / -")
            if len(known) < MAX_SCALARS:
                known.add(name)
        if len(self._scalars) + len(self._device_scalars) >= MAX_SCALARS:
            raise ValueError(f"a step holds at most {MAX_SCALARS} values")
        if is_tensor(value) and not value.is_cpu:
            if value.numel() != 1:
                raise ValueError(
                    f"a scalar has one element, this tensor has {value.numel()}: reduce it (.mean())"
                )
            self._device_scalars[name] = value.detach()
            self._scalars.pop(name, None)
        else:
            self._scalars[name] = host_number(value)
            if self._device_scalars:
                self._device_scalars.pop(name, None)

    def __enter__(self) -> Self:
        self._run._begin_step()
        self._run._step_opened(self)
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_clock()
        self._run._end_step(self, self._ended - self._began, error)
