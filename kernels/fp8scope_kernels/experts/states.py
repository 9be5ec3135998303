"""The scaling states of one tensor of each expert, in common buffers with a row for each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8scope_kernels.formats import Format
from fp8scope_kernels.recipes import Recipe
from fp8scope_kernels.scaling_state import ScalingState, Status

FLAGS = ("status", "reduced", "_started", "_unchecked", "_until_unreduced")
"""The facts that a state has beside its buffers."""


class ExpertStates(ScalingState):
    """Scaling states of `input`, `weight` or `grad_output` of all experts: `of(expert)` is that of one.

    The buffers are those of a `ScalingState` with one more dimension, [experts], in front: a checkpoint has
    three entries, whatever the number of experts. The state of an expert writes to its rows.
    """

    def __init__(
        self, recipe: Recipe, format: Format, experts: int, device: torch.device | str | None = None
    ) -> None:
        self._rows: dict[int, ScalingState] = {}
        super().__init__(recipe, format, device)
        self.experts = experts
        with torch.inference_mode(False):
            for name, buffer in list(self.named_buffers()):
                setattr(self, name, buffer.new_zeros((experts, *buffer.shape)))

    @property
    def status(self) -> Status:
        """As of a `ScalingState`; `stale` if the state of an expert is."""
        if any(state.status == "stale" for state in self._rows.values()):
            return "stale"
        return self._status

    @status.setter
    def status(self, value: Status) -> None:
        self._status: Status = value

    def of(self, expert: int) -> ScalingState:
        """The state of one expert: its buffers are rows of these."""
        state = self._rows.get(expert)
        if state is None:
            state = self._rows[expert] = ScalingState(self.recipe, self.format, "cpu")
            self._bind(expert, state)
        return state

    def states(self) -> list[ScalingState]:
        """The states of all experts."""
        return [self.of(expert) for expert in range(self.experts)]

    def _bind(self, expert: int, state: ScalingState) -> None:
        state.format = self.format
        with torch.inference_mode(False):
            for name, buffer in self.named_buffers():
                setattr(state, name, buffer[expert])
        state._is_empty = self._is_empty

    def _bind_all(self) -> None:
        for expert, state in self._rows.items():
            self._bind(expert, state)

    def _accept(self, calls: Tensor, history: Tensor) -> bool:
        """Note that these buffers were loaded. False if an expert has only a part."""
        self._rows.clear()
        if calls.shape != (self.experts,) or history.shape[:1] != calls.shape:
            return False
        seen = history.reshape(self.experts, -1).any(1).tolist()
        started = [count > 0 for count in calls.tolist()]
        if any(has_history and not is_started for has_history, is_started in zip(seen, started, strict=True)):
            return False
        for expert in (expert for expert, is_started in enumerate(started) if is_started):
            state = self.of(expert)
            state._started = state._unchecked = True
            state.status = "restored"
        self.status = "restored" if any(started) else "fresh"
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertStates":
        """Move with the model, as a `ScalingState` does."""
        super()._apply(fn, recurse)
        self._bind_all()
        return self

    def materialize(self, device: torch.device) -> None:
        """Give states from the meta device zeros on the device of their tensors."""
        before = self.scale
        super().materialize(device)
        if self.scale is not before:
            self._bind_all()

    def reset(self) -> None:
        """Clear all buffers; the next call of each expert computes the scale from its own tensor."""
        self._rows.clear()
        super().reset()

    def __getstate__(self) -> dict[str, Any]:
        # The rows of a copy are those of its own buffers.
        flags = {
            expert: {name: getattr(state, name) for name in FLAGS} for expert, state in self._rows.items()
        }
        return {**self.__dict__, "_rows": flags}

    def __setstate__(self, state: dict[str, Any]) -> None:
        flags = state["_rows"]
        super().__setstate__({**state, "_rows": {}})
        for expert, values in flags.items():
            row = self.of(expert)
            for name, value in values.items():
                setattr(row, name, value)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, experts={self.experts}"
