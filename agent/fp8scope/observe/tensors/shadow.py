"""Shadow mode shows how the tensors of a model in BF16, FP16 or FP32 would behave in FP8.

In sampled steps the input, weight and gradient of each layer are quantised and the results discarded; the
training is not affected. In other steps only amax and non-finite elements are collected, to compute delayed
scales.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.observe.tensors.base import OnError, local, path_of, shapes_of
from fp8scope.observe.tensors.buffers import (
    AMAX,
    NONFINITE,
    NUMEL,
    SCALE,
    StatisticsTable,
    StatisticsTables,
)
from fp8scope.observe.tensors.layers import is_foreign
from fp8scope.observe.tensors.switched_hooks import replace_observer
from fp8scope_kernels import (
    CurrentScaling,
    DelayedScaling,
    Format,
    HighPrecisionObserver,
    Recipe,
    Slot,
    accumulate_sample,
    amax_to_scale,
    candidate_layers,
    measure,
    quantize_blocks,
    quantize_values,
)
from fp8scope_kernels.convert import Selection, matches
from fp8scope_kernels.devices import to_device
from fp8scope_kernels.high_precision import add_extent, add_tensor
from fp8scope_kernels.recipes import ROLES, Role
from fp8scope_kernels.reference import Extent


class ShadowLayers:
    """Observes the layers of a model that are not FP8 as if they were quantised by `recipe`.

    `include` selects modules by glob patterns over their paths, or by a function of path and module; by
    default it is the linear layers that `convert` would convert. `scaler` is the `torch.amp.GradScaler` in
    use, if any; its factor is divided out of the gradients.
    """

    every_step = True

    def __init__(
        self,
        model: nn.Module,
        tables: StatisticsTables,
        on_error: OnError,
        recipe: Recipe,
        *,
        include: Selection | None = None,
        scaler: Any = None,
    ) -> None:
        self.recipe: Mapping[str, Any] = {"shadow": recipe.to_dict()}
        # Delayed scales need the amax of every step; other scales do not depend on past steps.
        self.is_paced = not isinstance(recipe, DelayedScaling)
        self.tensors = 0
        self._scales: dict[StatisticsTable, DelayedScales] = {}
        unscale = Unscale(scaler)
        for path, layer in chosen_layers(model, include):
            table = tables.on(device_of(layer), capacity=FIRST_ROWS)
            if isinstance(recipe, DelayedScaling) and table not in self._scales:
                self._scales[table] = DelayedScales(recipe, table)
            observer = ShadowObserver(recipe, unscale, self._scales.get(table))
            slots = self._register(path_of(path), layer, table, recipe)
            replace_observer(
                layer, observer, slots, on_error, tables.reading_hooks if self.is_paced else None
            )
            self.tensors += len(slots)

    def _register(self, path: str, layer: Any, table: StatisticsTable, recipe: Recipe) -> dict[Role, Slot]:
        shapes = shapes_of(layer) if isinstance(layer, nn.Linear) else {}
        slots: dict[Role, Slot] = {}
        for role in ROLES:
            if role == "weight" and not isinstance(getattr(layer, "weight", None), Tensor):
                continue
            name, format = f"{path}.{role}" if path else role, recipe.format_of(role, table.buffer.device)
            slots[role] = table.buffer.register(name, format=format, shape=shapes.get(role, (-1,)), role=role)
            if table in self._scales:
                self._scales[table].add(slots[role], format)
        return slots

    def finish(self, sampled: bool) -> None:
        for scales in self._scales.values():
            scales.update()


FIRST_ROWS = 256


def chosen_layers(model: nn.Module, include: Selection | None) -> Iterable[tuple[str, nn.Module]]:
    """Return the modules that `include` selects, with their paths; by default the linear layers."""
    if include is None:
        return [(path, layer) for path, layer in candidate_layers(model) if not is_foreign(layer)]
    return [(path, module) for path, module in model.named_modules() if matches(include, path, module)]


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's parameters; the CPU if it has none."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


class Unscale:
    """Divides a GradScaler's factor out of gradients, on the device."""

    def __init__(self, scaler: Any = None) -> None:
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._seen: tuple[int, int] | None = None
        self._inverse: Tensor | None = None

    def __call__(self, device: torch.device) -> Tensor | None:
        """Return the factor for gradients, a float32 scalar tensor; None if they are not scaled."""
        scaler = None if self._scaler is None else self._scaler()
        factor = getattr(scaler, "_scale", None)
        if scaler is None or factor is None or not scaler.is_enabled():
            return None
        # The scaler changes its factor in place: compare versions, which needs no device synchronisation.
        seen = (id(factor), factor._version)
        if seen != self._seen or self._inverse is None or self._inverse.device != device:
            self._inverse = factor.detach().reshape(()).to(device, non_blocking=True).float().reciprocal()
            self._seen = seen
        return self._inverse


class DelayedScales:
    """Delayed scales of all tensors of a table, computed together.

    Like `ScalingState`, but the history has one entry per step, its largest amax, instead of one per call.
    """

    def __init__(self, recipe: DelayedScaling, table: StatisticsTable) -> None:
        self._recipe = recipe
        self._table = table
        self._steps = 0
        self._slots: list[Slot] = []
        self._formats: list[Format] = []
        self._positions: dict[int, int] = {}
        self._rows = torch.zeros(0, dtype=torch.long)
        self._masks: dict[str, Tensor] = {}
        """For each format, which tensors have it."""
        self._scale = self._last = self._history = torch.zeros(0)

    def add(self, slot: Slot, format: Format) -> None:
        """Add a tensor."""
        if slot.index not in self._positions:
            self._positions[slot.index] = len(self._slots)
            self._slots.append(slot)
            self._formats.append(format)

    def scale_of(self, slot: Slot, amax: Tensor) -> Tensor:
        """Return the scale of this step, a float32 scalar tensor; without history, the scale of `amax`."""
        position = self._positions[slot.index]
        current = amax_to_scale(amax, self._formats[position], margin=self._recipe.margin)
        if position >= len(self._rows):
            return current
        scale = self._scale[position]
        return torch.where(scale > 0, scale, current)

    @torch.inference_mode(False)
    def update(self) -> None:
        """Append the amaxes of the step to the histories; called at its end."""
        self._grow()
        data = self._table.buffer.data[self._rows]
        amax, seen = data[:, AMAX].float(), data[:, NUMEL] > 0
        fresh = seen & (self._scale == 0)
        self._scale = torch.where(fresh, self._to_scale(amax, torch.ones_like(amax)), self._scale)
        column = self._history[:, self._steps % self._history.shape[1]]
        column.copy_(torch.where(seen, amax, column))
        self._last = torch.where(seen, amax, self._last)
        self._steps += 1
        if self._steps % self._recipe.interval == 0:
            past = self._history.amax(1) if self._recipe.amax_compute == "max" else self._last
            self._scale = self._to_scale(past, self._scale)

    def _to_scale(self, amax: Tensor, otherwise: Tensor) -> Tensor:
        scale = otherwise
        for format in dict.fromkeys(self._formats):
            new = amax_to_scale(amax, format, margin=self._recipe.margin, otherwise=otherwise)
            scale = torch.where(self._masks[format.name], new, scale)
        return scale

    def _grow(self) -> None:
        missing = len(self._slots) - len(self._rows)
        if not missing:
            return
        device = self._table.buffer.device
        self._rows = to_device(torch.tensor([slot.index for slot in self._slots], device="cpu"), device)
        self._masks = {
            format.name: to_device(
                torch.tensor([shadow_format == format for shadow_format in self._formats], device="cpu"),
                device,
            )
            for format in dict.fromkeys(self._formats)
        }
        zeros = torch.zeros(missing, device=device)
        self._scale = torch.cat((self._scale.to(device), zeros))
        self._last = torch.cat((self._last.to(device), zeros))
        history = zeros.new_zeros(len(self._slots), self._recipe.history_length)
        if self._history.numel():
            history[: len(self._history)] = self._history
        self._history = history


class ShadowObserver(HighPrecisionObserver):
    """Quantises a layer's tensors in sampled steps, without affecting the training."""

    def __init__(self, recipe: Recipe, unscale: Unscale, scales: DelayedScales | None) -> None:
        super().__init__()
        self._recipe = recipe
        self._unscale = unscale
        self._scales = scales
        self.every_step = scales is not None

    def write(self, role: Role, slot: Slot, x: Tensor) -> None:
        x = local(x)
        factor = self._unscale(x.device) if role == "grad_output" else None
        if not slot.buffer.sampling:
            if factor is None:
                add_tensor(slot, x)
            else:
                extent = measure(x)
                add_extent(slot.row, x.numel(), Extent(extent.amax * factor, extent.nonfinite))
            slot.row[SCALE:NONFINITE].fill_(torch.nan)
        elif x.numel():
            self._quantize(role, slot, x if factor is None else x.float() * factor)

    def _quantize(self, role: Role, slot: Slot, x: Tensor) -> None:
        recipe, format, sample = self._recipe, self._recipe.format_of(role, x.device), slot.sample_row
        grid = recipe.block_of(role)
        if grid is not None:
            x = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
            blocks = quantize_blocks(x, format, grid, recipe, slot.row, slot.block_row)
            values, inverse = blocks.dequantize(), torch.ones((), device=x.device)
        else:
            extent = measure(x)
            scale = self._scale(slot, extent.amax, format)
            # Always round to nearest: stochastic rounding would advance the training's random generator.
            values = quantize_values(
                x, scale, format, slot.row,
                saturate=recipe.saturate, extent=extent, nonfinite=recipe.nonfinite,
            )  # fmt: skip
            inverse = scale.reciprocal()
        if sample is not None:
            accumulate_sample(sample, x, values, inverse)

    def _scale(self, slot: Slot, amax: Tensor, format: Format) -> Tensor:
        if self._scales is not None:
            return self._scales.scale_of(slot, amax)
        assert isinstance(self._recipe, CurrentScaling)
        return amax_to_scale(amax, format, margin=self._recipe.margin, power_of_two=self._recipe.power_of_two)
