"""The scaling state of one tensor: what a recipe remembers between calls."""

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8scope_kernels.formats import Format
from fp8scope_kernels.quantization import amax_to_scale
from fp8scope_kernels.recipes import CurrentScaling, DelayedScaling, Recipe

Status = Literal["fresh", "restored", "missing", "stale"]
"""What loading a checkpoint did to a delayed scaling state: `fresh`, nothing; `restored`, it brought the
state along; `missing`, it did not; `stale`, what it brought did not fit the tensor that came next."""

STALE_FACTOR = 16.0
"""A restored scale that puts amax this far above or below its place is not of this tensor's recent past."""

UNREDUCED_CALLS = 256
"""Calls after which a history that was to be reduced over ranks, and never was, is told about."""


class ScalingState(nn.Module):
    """Chooses the scale of one tensor, call after call.

    Buffers, all in the state_dict and all readable as telemetry: `scale`, float32 without dimensions, the
    multiplier of the last call (0 before the first); under `DelayedScaling` also `amax_history`, float32
    [history_length], newest first. The number of calls travels as the module's extra state.

    An amax of 0 (an empty or all-zero tensor, or one without a finite element) never sets a delayed scale:
    the old one is kept. Inf elements do not reach amax, so that one of them cannot freeze the scale; an Inf
    that a history brings along from elsewhere keeps the old scale until it has passed through.

    Loading a checkpoint into a delayed state sets `status`. A state that is missing or stale warns and starts
    afresh; the scale is held against its tensor at the first call after loading, which on a GPU waits once.
    """

    scale: Tensor
    amax_history: Tensor
    status: Status

    def __init__(self, recipe: Recipe, format: Format, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.format = format
        self.calls = 0
        self.status = "fresh"
        self.reduced = False
        """Whether `sync_amaxes` has ever been here."""
        self._unchecked = False
        self.register_buffer("scale", torch.zeros((), device=device))
        if isinstance(recipe, DelayedScaling):
            self.register_buffer("amax_history", torch.zeros(recipe.history_length, device=device))

    def next_scale(self, amax: Tensor, *, update: bool = True) -> Tensor:
        """The scale, float32 without dimensions, for a tensor with this amax.

        With `update` False (evaluation, recomputation) the state stays as it is, and delayed scaling uses
        the scale of the last call again.
        """
        if isinstance(self.recipe, DelayedScaling):
            return self._delayed_scale(self.recipe, amax, update)
        if not isinstance(self.recipe, CurrentScaling):
            raise TypeError(f"{self.recipe.kind} has a scale per block, which needs no state.")
        scale = amax_to_scale(
            amax, self.format, margin=self.recipe.margin, power_of_two=self.recipe.power_of_two
        )
        if update:
            self.scale.copy_(scale)
            self.calls += 1
        return scale

    def past_scale(self, *, update: bool = True) -> Tensor | None:
        """`next_scale` for a tensor not measured yet; None where the scale depends on the tensor itself.

        Lets one pass over the tensor both cast and measure it. With `update`, `remember` has to follow.
        """
        if not isinstance(self.recipe, DelayedScaling) or self.calls == 0 or self._unchecked:
            return None
        return self._past_scale(self.recipe, update)

    def remember(self, amax: Tensor) -> None:
        """Add the amax of the tensor just scaled to a delayed state's history, and count the call."""
        assert isinstance(self.recipe, DelayedScaling)
        self.amax_history.copy_(self.amax_history.roll(1))
        self.amax_history[0] = amax
        self.calls += 1
        if self.recipe.reduce_amax and self.calls == UNREDUCED_CALLS:
            self._check_reduced()

    def _delayed_scale(self, recipe: DelayedScaling, amax: Tensor, update: bool) -> Tensor:
        if self._unchecked:
            self._check(recipe, amax)
        if self.calls:
            scale = self._past_scale(recipe, update)
        else:
            scale = amax_to_scale(amax, self.format, margin=recipe.margin)
            if update:
                self.scale.copy_(scale)
        if update:
            self.remember(amax)
        return scale

    def _past_scale(self, recipe: DelayedScaling, update: bool) -> Tensor:
        scale = self.scale.clone()
        if update and self.calls % recipe.interval == 0:
            past = self.amax_history.amax() if recipe.amax_compute == "max" else self.amax_history[0]
            scale = amax_to_scale(past, self.format, margin=recipe.margin, otherwise=scale)
            self.scale.copy_(scale)
        return scale

    def _check(self, recipe: DelayedScaling, amax: Tensor) -> None:
        """Hold the scale that a checkpoint brought against the first tensor that it is for."""
        if amax.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._unchecked = False
        place = float(amax * self.scale) / (self.format.max * 2.0**-recipe.margin)
        if amax > 0 and not 1 / STALE_FACTOR <= place <= STALE_FACTOR:
            self.reset()
            self.status = "stale"
            warnings.warn(
                "A checkpoint brought scaling state that does not fit its tensor: was it saved with other "
                "weights? That state starts afresh; scaling_status(model) says where.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _check_reduced(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and not self.reduced and torch.distributed.get_world_size() > 1:
            warnings.warn(
                "reduce_amax=True, but amax histories were never reduced: call sync_amaxes(model) after "
                "every optimizer step, or sync_amaxes_after(optimizer, model) once.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not isinstance(self.recipe, DelayedScaling):
            return
        if all(prefix + name in state_dict for name in ("scale", "amax_history", "_extra_state")):
            self.status = "restored" if self.calls else "fresh"
            self._unchecked = self.calls > 0
            return
        self.reset()
        self.status = "missing"
        warnings.warn(
            "A checkpoint was loaded that has no scaling state for some tensors; they start afresh. "
            "scaling_status(model) says which.",
            RuntimeWarning,
            stacklevel=2,
        )

    def reset(self) -> None:
        """Forget the past; the next call starts afresh from its own tensor."""
        self.calls = 0
        self.status = "fresh"
        self._unchecked = False
        self.scale.zero_()
        if isinstance(self.recipe, DelayedScaling):
            self.amax_history.zero_()

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def extra_repr(self) -> str:
        return f"{self.recipe.kind}, {self.format.name}"


def scaling_status(model: nn.Module) -> dict[str, Status]:
    """The status of every scaling state in the model, by the name of its tensor (`<module>.<role>`)."""
    return {
        name.replace("scaling.", ""): module.status
        for name, module in model.named_modules()
        if isinstance(module, ScalingState)
    }
