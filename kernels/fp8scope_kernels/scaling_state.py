"""The scaling state of one tensor: what a recipe keeps between calls."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fp8scope_kernels import backends, devices
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import Format, in_encoding
from fp8scope_kernels.plain_tensors import is_abstract, readable
from fp8scope_kernels.quantization import amax_to_scale
from fp8scope_kernels.recipes import CurrentScaling, DelayedScaling, Recipe
from fp8scope_kernels.reference import Extent
from fp8scope_kernels.triton import backend as triton_backend
from fp8scope_kernels.triton.backend import AmaxHistory, ChosenScale

Group = Any
"""A `torch.distributed.ProcessGroup`."""

Status = Literal["fresh", "restored", "missing", "stale"]
"""The effect of loading a checkpoint on a delayed scaling state: `fresh`, nothing was loaded; `restored`, the
state was loaded; `missing`, the checkpoint had none, or only part of it; `stale`, the loaded state did not
fit the next tensor."""

STATE = ("scale", "amax_history", "calls")
"""The buffers of a delayed state."""

CONTAINER = re.compile(r"(^|\.)(?:fp8_)?scaling\.")
"""The name of what contains a layer's states, in their paths."""

STALE_FACTOR = 16.0
"""A restored scale is stale if it maps amax to more than this factor above or below its target."""

UNREDUCED_CALLS = 256
"""Calls after which a warning says that a history with `reduce_amax` was never reduced over ranks."""


class ScalingState(nn.Module):
    """Computes the scale of one tensor at each call.

    Its buffers can be read as telemetry. `scale`, float32 without dimensions, is the multiplier of the last
    call (0 before the first). `DelayedScaling` adds `amax_history`, float32 [history_length], newest first,
    and `calls`, int64 without dimensions, which counts the calls that updated it. Its three buffers are in
    the state_dict; other recipes need no state, so that theirs is not, and a checkpoint's is ignored. All
    stay on the device and in these dtypes, so that a captured CUDA graph counts when replayed.

    An amax of 0 (an empty or all-zero tensor, or one without a finite element) says nothing of the next
    tensor: it does not enter a history and is not counted, so that an expert without tokens keeps its scale.
    Inf elements do not enter amax, so that one of them cannot freeze the scale. An Inf in a history from
    elsewhere keeps the old scale until it has left the history.

    Loading a checkpoint into a delayed state sets `status`. A missing or stale state warns and is reset. A
    checkpoint of a BF16 model loads strictly, one with only part of the state does not. The scale is checked
    against its tensor at the first call after loading; on a GPU this waits once. Older checkpoints with the
    number of calls as extra state can be loaded; for torch.distributed.checkpoint use the planner in
    dcp_planner.py.

    `format` follows the device: where the recipe leaves the encoding to it, a state that moves to a device
    with other formats changes to these, and its scale by the quotient of their maxima.

    A state that was made on the meta device is cleared when it gets memory: by `to_empty`, which leaves in it
    what was there, or at its first call.
    """

    scale: Tensor
    amax_history: Tensor
    calls: Tensor
    status: Status

    _is_empty = False
    """True if the buffers are, or were, on the meta device, and nothing has been written to them since. A
    default of the class: older pickles have no such attribute."""

    _group: Group | None = None
    """The process group whose ranks have the parts of the tensor in hand; see `over`."""

    def __init__(self, recipe: Recipe, format: Format, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.format = format
        self.status = "fresh"
        self.reduced = False
        """Whether `sync_amaxes` has ever reduced this state."""
        self._unchecked = False
        # Whether `calls` is known to be above 0, without reading it from the device.
        self._started = False
        self._until_unreduced = UNREDUCED_CALLS
        # A model that is converted or moved in inference mode must be able to train after it.
        with torch.inference_mode(False):
            stateful = isinstance(recipe, DelayedScaling)
            scale = torch.zeros((), dtype=torch.float32, device=device)
            self.register_buffer("scale", scale, persistent=stateful)
            if isinstance(recipe, DelayedScaling):
                history = torch.zeros(recipe.history_length, dtype=torch.float32, device=device)
                self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=device))
                self.register_buffer("amax_history", history)
        self._is_empty = self._has_meta()
        self._follow_device()

    def _follow_device(self) -> None:
        """Change to the format that the recipe takes on the device of the buffers."""
        format = in_encoding(self.format, self.recipe.encoding_on(self.scale.device))
        if format != self.format:
            with torch.inference_mode(False), torch.no_grad():
                self.scale.mul_(format.max / self.format.max)
            self.format = format

    def next_scale(self, amax: Tensor, *, update: bool = True) -> Tensor:
        """The scale, float32 without dimensions, for a tensor with this amax.

        With `update` False (evaluation, recomputation) the state stays as it is, and delayed scaling uses
        the scale of the last call again.
        """
        self.materialize(amax.device)
        amax = self._over_ranks(amax)
        if isinstance(self.recipe, DelayedScaling):
            return self._delayed_scale(self.recipe, amax, update)
        if not isinstance(self.recipe, CurrentScaling):
            raise TypeError(f"{self.recipe.kind} has a scale per block and needs no state.")
        scale = amax_to_scale(
            amax, self.format, margin=self.recipe.margin, power_of_two=self.recipe.power_of_two
        )
        if update:
            self.scale.copy_(scale)
        return scale

    def scale_before(self, amax: Tensor, *, update: bool = True) -> Tensor:
        """The result that `next_scale` is going to have; the state stays as it is."""
        self.materialize(amax.device)
        if not isinstance(self.recipe, DelayedScaling):
            return self.next_scale(amax, update=False)
        if self._unchecked:
            self._check(self.recipe, amax)
        before = self.scale.clone()
        scale = self._scale_of_call(self.recipe, amax, update)
        self.scale.copy_(before)
        return scale

    def freeze(self, scale: Tensor) -> None:
        """Take a scale from elsewhere, float32 without dimensions; 0: that of the tensor's own amax."""
        self.scale = scale
        if isinstance(self.recipe, DelayedScaling):
            self.calls = (scale != 0).long()

    def past_scale(self, *, update: bool = True) -> ChosenScale | None:
        """`next_scale` for a tensor not measured yet; None if the scale depends on the tensor itself.

        With it, one pass over the tensor can both cast and measure. With `update`, call `remember` next.
        """
        recipe = self.recipe
        has_scale = self._started and not (self._unchecked or self._is_empty)
        if not isinstance(recipe, DelayedScaling) or not has_scale:
            return None
        if update and self._is_for_triton():
            history, top = AmaxHistory(self._past(recipe), self.calls), self.format.max * 2.0**-recipe.margin
            launched = backends.attempt_triton(
                "delayed_scale",
                lambda: triton_backend.delayed_scale(history, self.scale, recipe.interval, top),
            )
            if launched is not None:
                return launched
        scale = self._past_scale(recipe, update)
        return ChosenScale(scale, scale.reciprocal())

    def measure_and_scale(self, x: Tensor, *, update: bool = True) -> tuple[ChosenScale, Extent] | None:
        """The extent of x and `next_scale` of its amax, by Triton; None where they are computed apart."""
        recipe = self.recipe
        if not isinstance(recipe, CurrentScaling) or self._group is not None:
            return None
        kernels: tuple[backends.TritonKernel, ...] = ("measure", "current_scale")
        if not (all(backends.use_triton(x, kernel) for kernel in kernels) and x.numel()):
            return None
        x = readable(x)
        self.materialize(x.device)
        if self.scale.device != x.device:
            return None
        launched = backends.attempt_triton(
            "current_scale",
            lambda: triton_backend.measure_and_scale(
                x,
                self.format.max * 2.0**-recipe.margin,
                power_of_two=recipe.power_of_two,
                store=self.scale if update else None,
            ),
        )
        return None if launched is None else (launched[1], Extent(*launched[0]))

    def history_to_launch(self) -> AmaxHistory | None:
        """The history to which the launch that measures a tensor can add its amax; then call `remembered`.

        None where it must be added by `remember`.
        """
        if self._group is not None or not self._is_for_triton():
            return None
        return AmaxHistory(self.amax_history, self.calls)

    def remember(self, amax: Tensor) -> None:
        """Add the amax of the tensor just scaled to a delayed state's history, and count the call.

        An amax of 0 is neither added nor counted. On a GPU a call waits until one has been counted.
        """
        self._remember(self._over_ranks(amax))

    def remembered(self) -> None:
        """The amax of a state that has been started was added, and the call counted."""
        if isinstance(self.recipe, DelayedScaling) and self.recipe.reduce_amax:
            self._until_unreduced -= 1
            if self._until_unreduced == 0:
                self._check_reduced()

    def _remember(self, amax: Tensor) -> None:
        assert isinstance(self.recipe, DelayedScaling)
        history = self.amax_history
        if self._is_for_compiled():
            cpu_backend.remember(history, self.calls, float(amax))
        else:
            # Decided on the device, as a graph is replayed with other tensors.
            moved = history.roll(1)
            moved[0] = amax
            history.copy_(torch.where(amax != 0, moved, history))
            self.calls.add_(amax != 0)
        if not self._started:
            # A call that is being captured into a graph has not been executed yet.
            self._started = not _is_capturing(history) and (is_abstract(amax) or bool(self.calls > 0))
        self.remembered()

    @contextmanager
    def over(self, group: Group | None) -> Iterator[None]:
        """Within the block, tensors are parts: an amax is the maximum over the ranks of the process group.

        None means that the tensors are whole. All ranks must do the same in the block.
        """
        self._group = group
        try:
            yield
        finally:
            self._group = None

    def _over_ranks(self, amax: Tensor) -> Tensor:
        if self._group is None or is_abstract(amax):
            return amax
        amax = amax.clone()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._group)
        return amax

    def _delayed_scale(self, recipe: DelayedScaling, amax: Tensor, update: bool) -> Tensor:
        if self._unchecked:
            self._check(recipe, amax)
        scale = self._scale_of_call(recipe, amax, update)
        if update:
            self._remember(amax)
        return scale

    def _scale_of_call(self, recipe: DelayedScaling, amax: Tensor, update: bool) -> Tensor:
        scale = self._past_scale(recipe, update)
        if not self._started:
            # Decided on the device: a graph captured at the first call is replayed for later ones.
            own = amax_to_scale(amax, self.format, margin=recipe.margin)
            scale = torch.where(self.calls == 0, own, scale)
            if update:
                self.scale.copy_(scale)
        return scale

    def _past_scale(self, recipe: DelayedScaling, update: bool) -> Tensor:
        old = self.scale.clone()
        if not update:
            return old
        if self._is_for_compiled():
            past, top = self._past(recipe), self.format.max * 2.0**-recipe.margin
            return old.fill_(cpu_backend.past_scale(past, self.scale, self.calls, recipe.interval, top))
        past = self.amax_history.amax() if recipe.amax_compute == "max" else self.amax_history[0]
        scale = amax_to_scale(past, self.format, margin=recipe.margin, otherwise=old)
        if recipe.interval > 1:
            scale = torch.where(self.calls % recipe.interval == 0, scale, old)
        self.scale.copy_(scale)
        return scale

    def _past(self, recipe: DelayedScaling) -> Tensor:
        """The part of the history that the next scale depends on."""
        return self.amax_history if recipe.amax_compute == "max" else self.amax_history[:1]

    def _is_for_compiled(self) -> bool:
        """Return whether the compiled kernels can update this state."""
        return self._is_as_made() and backends.use_compiled(self.scale)

    def _is_for_triton(self) -> bool:
        """Return whether the Triton kernels can update this state."""
        return self._is_as_made() and backends.use_triton(self.scale, "delayed_scale")

    def _is_as_made(self) -> bool:
        """Return whether kernels can read the buffers from memory. A checkpoint may have replaced them."""
        scale, history, calls = self.scale, self.amax_history, self.calls
        return (
            history.dtype == scale.dtype == torch.float32
            and calls.dtype == torch.int64
            and history.device == calls.device == scale.device
            and type(history) is type(calls) is Tensor
            and history.is_contiguous()
        )

    def _check(self, recipe: DelayedScaling, amax: Tensor) -> None:
        """Check a scale from a checkpoint against the first tensor that it is used for."""
        if _is_capturing(amax) or is_abstract(amax):
            return
        self._unchecked = False
        quotient = float(amax * self.scale) / (self.format.max * 2.0**-recipe.margin)
        if amax > 0 and not 1 / STALE_FACTOR <= quotient <= STALE_FACTOR:
            self.reset()
            self.status = "stale"
            warnings.warn(
                "The scaling state of a checkpoint does not fit its tensor: was it saved with other weights? "
                "The state was reset; scaling_status(model) shows which.",
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
        old_calls = state_dict.pop(f"{prefix}_extra_state", None)
        if not isinstance(self.recipe, DelayedScaling):
            # Checkpoints of version 0.1, and of a delayed recipe, have state that this recipe does not need.
            for name in STATE:
                state_dict.pop(prefix + name, None)
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        if old_calls is not None and f"{prefix}calls" not in state_dict:
            state_dict[f"{prefix}calls"] = torch.as_tensor(old_calls, dtype=torch.int64)
            warn_older_form()
        super()._load_from_state_dict(state_dict, prefix, *args)
        # Loading copies nothing to the meta device, unless it assigns.
        self._is_empty = self._has_meta()
        # Read from the checkpoint: the buffer may be on a device, or on the meta device.
        if all(prefix + name in state_dict for name in STATE) and self._accept(
            state_dict[f"{prefix}calls"], state_dict[f"{prefix}amax_history"]
        ):
            return
        if not any(prefix + name in state_dict for name in STATE):
            # A checkpoint from before `convert` is complete. One with a part of the state is damaged.
            missing_keys: list[str] = args[2]
            missing_keys[:] = [key for key in missing_keys if not key.startswith(prefix)]
        self.reset()
        self.status = "missing"
        warnings.warn(
            "The loaded checkpoint has no scaling state, or only part of it, for some tensors; their state "
            "was reset. scaling_status(model) shows which.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _accept(self, calls: Tensor, history: Tensor) -> bool:
        """Note that these buffers were loaded. False if they are only a part: a history without a call."""
        started = bool(calls > 0)
        if not started and bool(history.any()):
            return False
        self._started = self._unchecked = started
        self.status = "restored" if started else "fresh"
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ScalingState":
        """Move with the model, but keep the dtypes: BF16 would round a scale.

        `to_empty` leaves memory as it was. A state from the meta device is cleared, others keep their values.
        """
        before = dict(self.named_buffers())
        with torch.inference_mode(False):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name, buffer in before.items():
                moved = self.get_buffer(name)
                if moved.dtype != buffer.dtype:
                    setattr(self, name, _moved(buffer, moved.device))
                elif not (moved is buffer or moved.is_meta or buffer.is_meta):
                    moved.copy_(buffer)
        self._follow_device()
        if self._has_meta():
            self._is_empty = True
        elif self._is_empty or any(buffer.is_meta for buffer in before.values()):
            self._clear()
        return self

    def materialize(self, device: torch.device) -> None:
        """Give a state from the meta device, at its first call, zeros on the device of its tensor."""
        if type(self.scale) is not Tensor and hasattr(self.scale, "to_local"):
            self._localize()
        if not self._is_empty or device.type == "meta":
            return
        if devices.is_capturing(device):
            raise RuntimeError("Scaling state from the meta device has no values: run the model once before.")
        with torch.inference_mode(False):
            for name, buffer in list(self.named_buffers()):
                setattr(self, name, _moved(buffer, device))
        self._follow_device()
        self._clear()

    def _localize(self) -> None:
        """Take this rank's part of buffers that `distribute_module` has replicated with those of a parent."""
        for name, buffer in list(self.named_buffers()):
            local: Any = buffer
            setattr(self, name, local.to_local())

    def _has_meta(self) -> bool:
        return any(buffer.is_meta for buffer in self.buffers())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not isinstance(self.recipe, DelayedScaling):
            # Modules that version 0.1 has pickled store this buffer with the state.
            self._non_persistent_buffers_set.add("scale")

    def _clear(self) -> None:
        """`reset`, but the status goes on saying what a checkpoint lacked."""
        status = self.status
        self.reset()
        self.status = "missing" if status == "missing" else "fresh"

    def reset(self) -> None:
        """Clear all buffers; the next call computes the scale from its own tensor."""
        self.status = "fresh"
        self._unchecked = self._started = False
        self._is_empty = self._has_meta()
        for buffer in self.buffers():
            buffer.zero_()

    def states(self) -> list["ScalingState"]:
        """The states of single tensors in this module: itself."""
        return [self]

    def extra_repr(self) -> str:
        return f"{self.recipe.kind}, {self.format.name}"


def warn_older_form() -> None:
    """Warn that a checkpoint stores the number of calls as extra state, and was read correctly."""
    warnings.warn(
        "The loaded checkpoint has scaling state in an older form, which was read without loss. "
        "New checkpoints are saved in the current form.",
        UserWarning,
        stacklevel=3,
    )


def _moved(buffer: Tensor, device: torch.device) -> Tensor:
    """The buffer on `device`; zeros if it has no values."""
    return torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _is_capturing(like: Tensor) -> bool:
    return devices.is_capturing(like.device)


def scaling_status(model: nn.Module) -> dict[str, Status]:
    """The status of every scaling state in the model, by the name of its tensor (`<module>.<role>`)."""
    return {
        CONTAINER.sub(r"\1", name): module.status
        for name, module in model.named_modules()
        if isinstance(module, ScalingState)
    }
