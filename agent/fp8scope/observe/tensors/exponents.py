"""A source that records the exponents of linear layers in BF16, FP16 or FP32, without casting anything.

From exponents and amax the server computes what any number format would do to the tensors. Exponents take one
more pass over each tensor, in sampled steps only.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fp8scope.observe.tensors.base import OnError, local, path_of, shapes_of
from fp8scope.observe.tensors.buffers import StatisticsTables
from fp8scope.observe.tensors.shadow import Unscale, chosen_layers, device_of
from fp8scope.observe.tensors.switched_hooks import replace_observer
from fp8scope_kernels import HighPrecisionObserver, Slot, exponent_histogram, measure
from fp8scope_kernels.convert import Selection
from fp8scope_kernels.high_precision import add_extent, add_tensor
from fp8scope_kernels.recipes import ROLES, Role
from fp8scope_kernels.reference import Extent


class ExponentLayers:
    """Observes amax, non-finite elements and, in sampled steps, the exponents of layers in high precision.

    `include` and `scaler` are as for `ShadowLayers`.
    """

    every_step = False
    is_paced = True
    recipe: Mapping[str, Any] = {}

    def __init__(
        self,
        model: nn.Module,
        tables: StatisticsTables,
        on_error: OnError,
        *,
        include: Selection | None = None,
        scaler: Any = None,
    ) -> None:
        unscale = Unscale(scaler)
        self.tensors = 0
        for path, layer in chosen_layers(model, include):
            buffer = tables.on(device_of(layer)).buffer
            shapes = shapes_of(layer) if isinstance(layer, nn.Linear) else {}
            slots: dict[Role, Slot] = {}
            for role in ROLES:
                if role == "weight" and not isinstance(getattr(layer, "weight", None), Tensor):
                    continue
                name = f"{path_of(path)}.{role}" if path else role
                slots[role] = buffer.register(name, format=None, shape=shapes.get(role, (-1,)), role=role)
            replace_observer(layer, ExponentObserver(unscale), slots, on_error, tables.reading_hooks)
            self.tensors += len(slots)

    def finish(self, sampled: bool) -> None:
        pass


class ExponentObserver(HighPrecisionObserver):
    """Adds the exponents of a layer's tensors to its samples."""

    def __init__(self, unscale: Unscale) -> None:
        super().__init__()
        self._unscale = unscale

    def write(self, role: Role, slot: Slot, x: Tensor) -> None:
        x = local(x)
        factor = self._unscale(x.device) if role == "grad_output" else None
        if factor is None:
            add_tensor(slot, x)
        else:
            extent = measure(x)
            add_extent(slot.row, x.numel(), Extent(extent.amax * factor, extent.nonfinite))
        sample = slot.sample_row
        if sample is not None and x.numel():
            # Before the exponents are the sums of a cast, which stay zero.
            sample[2:] += exponent_histogram(x if factor is None else x.float() * factor)
