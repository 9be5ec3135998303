"""Collects statistics of torchao's `Float8Linear` from the high-precision tensors that it casts.

torchao keeps no statistics. Scales are computed here with torchao's functions, so that they equal those that
the layer used, including NaN and rounding. The effects of the cast are counted as for our own layers.

With the recipe `rowwise_with_gw_hp` a layer casts its weight twice: with a scale per row for the output, and
with one scale for the gradient of the input. Only the first cast is observed.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8scope.observe.tensors.base import OnError, local, path_of, shapes_of
from fp8scope.observe.tensors.buffers import (
    COUNTS,
    NONFINITE,
    NUMEL,
    SCALE,
    StatisticsTable,
    StatisticsTables,
)
from fp8scope.observe.tensors.switched_hooks import replace_observer
from fp8scope_kernels import (
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    Format,
    HighPrecisionObserver,
    Slot,
    accumulate_sample,
    measure,
    quantize,
    to_fp8_saturated,
)
from fp8scope_kernels.high_precision import add_extent
from fp8scope_kernels.recipes import ROLES, Role

FORMAT_OF = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.float8_e4m3fnuz: E4M3FNUZ,
    torch.float8_e5m2fnuz: E5M2FNUZ,
}


class Cast(NamedTuple):
    """The cast of one tensor by a layer. `format` is None for an unsupported dtype (AMD's fnuz formats)."""

    dtype: torch.dtype
    format: Format | None
    rowwise: bool
    scale_of: Callable[[Tensor], Tensor]


class Float8Layers:
    """Observes the model's layers of the class `torchao.float8.Float8Linear`."""

    every_step = False

    def __init__(self, model: nn.Module, tables: StatisticsTables, on_error: OnError) -> None:
        self.recipe: Mapping[str, Any] = {}
        self.tensors = 0
        layers = [(path, module) for path, module in model.named_modules() if is_float8_linear(module)]
        for path, layer in layers:
            table = tables.on(layer.weight.device, capacity=max(256, 3 * len(layers)))
            self._bind(path_of(path), layer, table, on_error)
            self.recipe = self.recipe or recipe_of(layer.config)

    def _bind(self, path: str, layer: Any, table: StatisticsTable, on_error: OnError) -> None:
        casts = casts_of(layer.config)
        slots: dict[Role, Slot] = {}
        for role, shape in shapes_of(layer).items():
            if role in casts:
                name = f"{path}.{role}" if path else role
                slots[role] = table.buffer.register(name, format=casts[role].format, shape=shape, role=role)
        self.tensors += len(slots)
        replace_observer(layer, Float8Observer(casts), slots, on_error)

    def finish(self, sampled: bool) -> None:
        pass


def is_float8_linear(module: nn.Module) -> bool:
    """Return whether this is a layer of torchao, without importing torchao."""
    # By name over the whole MRO: FSDP creates a subclass.
    return any(
        cls.__name__ == "Float8Linear" and cls.__module__.startswith("torchao.")
        for cls in type(module).__mro__
    )


def casts_of(config: Any) -> dict[Role, Cast]:
    """Return how a layer with this `Float8LinearConfig` casts its tensors; uncast tensors are left out."""
    from torchao.float8.config import ScalingGranularity, ScalingType
    from torchao.float8.float8_utils import tensor_to_scale

    casts: dict[Role, Cast] = {}
    for role in ROLES:
        cast = getattr(config, f"cast_config_{role}")
        if cast.scaling_type is ScalingType.DISABLED:
            continue
        rowwise = cast.scaling_granularity is ScalingGranularity.AXISWISE

        def scale_of(x: Tensor, cast: Any = cast, rowwise: bool = rowwise) -> Tensor:
            scale: Tensor = tensor_to_scale(
                x,
                cast.target_dtype,
                scaling_granularity=cast.scaling_granularity,
                axiswise_dim=-1 if rowwise else None,
                round_scales_to_power_of_2=config.round_scales_to_power_of_2,
            )
            return scale

        casts[role] = Cast(cast.target_dtype, FORMAT_OF.get(cast.target_dtype), rowwise, scale_of)
    return casts


def recipe_of(config: Any) -> dict[str, Any]:
    """Return a short description of the configuration, for the run's page."""
    casts = casts_of(config)
    return {
        "recipe": "torchao.float8",
        "power_of_two": bool(config.round_scales_to_power_of_2),
        **{
            role: f"{str(cast.dtype).removeprefix('torch.')} {'rowwise' if cast.rowwise else 'tensorwise'}"
            for role, cast in casts.items()
        },
    }


class Float8Observer(HighPrecisionObserver):
    """Collects the statistics of the casts of a `Float8Linear`, in each call."""

    every_step = True

    def __init__(self, casts: Mapping[Role, Cast]) -> None:
        super().__init__()
        self._casts = casts

    def write(self, role: Role, slot: Slot, x: Tensor) -> None:
        if role == "input" and torch.is_autocast_enabled():
            # The layer uses the GPU's autocast dtype on every device.
            x = x.to(torch.get_autocast_gpu_dtype())
        if role == "weight":
            x = getattr(x, "_tensor", x)
        if hasattr(x, "_data") and hasattr(x, "_scale"):
            count_cast_already(slot.row, x)
            return
        x = local(x)
        if role == "weight" and x.numel() < slot.info.numel:
            # A shard: the layer casts the whole weight, so its scale cannot be computed here.
            add_extent(slot.row, x.numel(), measure(x))
            slot.row[SCALE:NONFINITE].fill_(torch.nan)
        elif x.numel():
            count_cast(slot, x, self._casts[role])


def count_cast_already(row: Tensor, x: Any) -> None:
    """Count a tensor that FSDP gathered in FP8: its values before the cast are unknown."""
    row[NUMEL] += x.numel()
    row[NUMEL + 1 :] = torch.nan
    row[SCALE] = x._scale.max()


def count_cast(slot: Slot, x: Tensor, cast: Cast) -> None:
    """Add one cast of x (not empty) to its row, and to its sample in a sampled step."""
    scale = cast.scale_of(x)
    if cast.format is None:
        add_extent(slot.row, x.numel(), measure(x))
        slot.row[COUNTS] = torch.nan
        slot.row[SCALE] = scale.median()
        return
    if cast.rowwise:
        values = _count_rows(slot, x, scale, cast.format)
    else:
        # The cast of torchao clamps; an Inf affects only the scale.
        values = quantize(x, scale, cast.format, slot.row, nonfinite="clamp").data
    sample = slot.sample_row
    if sample is not None:
        accumulate_sample(sample, x, values, scale.reciprocal())


def _count_rows(slot: Slot, x: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Count with torchao's scale for each row, and return q."""
    scaled = x.float() * scale
    values = to_fp8_saturated(scaled, format)
    magnitude, q = scaled.abs(), values.float().abs()
    saturated = (magnitude > format.limit) & torch.isfinite(x)
    row, blocks = slot.row, slot.block_row
    add_extent(row, x.numel(), measure(x))
    row[SCALE] = scale.median()
    row[COUNTS] += torch.stack(
        (
            saturated.sum(),
            ((q == 0) & (x != 0)).sum(),
            ((q > 0) & (q < format.smallest_normal)).sum(),
        )
    )
    blocks[0] += scale.numel()
    blocks[1] += saturated.any(-1).sum()
    blocks[2:] = torch.stack((scale.min(), scale.median(), scale.max()))
    return values
