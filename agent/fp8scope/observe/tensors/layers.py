"""Sources for our FP8 layers and for linear layers in high precision.

The kernels count the statistics while they quantise. In sampled steps, this module adds the state of delayed
scales.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.observe.tensors.base import OnError, path_of
from fp8scope.observe.tensors.buffers import StatisticsTable, StatisticsTables
from fp8scope.observe.tensors.switched_hooks import replace_observer
from fp8scope_kernels import (
    DelayedScaling,
    Fp8Linear,
    HighPrecisionObserver,
    ScalingState,
    Slot,
    candidate_layers,
    experts_in_high_precision,
    fp8_layers,
    observe_layer,
    observe_plain_experts,
    unobserve_plain_experts,
)
from fp8scope_kernels.recipes import ROLES


class Fp8Layers:
    """Observes the `Fp8Linear` layers of a model."""

    every_step = False
    adds_up = True

    def __init__(self, model: nn.Module, tables: StatisticsTables) -> None:
        layers = list(fp8_layers(model))
        self.tensors = len(ROLES) * len(layers)
        self.recipe: Mapping[str, Any] = layers[0][1].recipe.to_dict() if layers else {}
        # The run must not keep the model alive.
        self._layers: list[tuple[weakref.ref[Fp8Linear], StatisticsTable]] = []
        for path, layer in layers:
            table = tables.on(layer.weight.device, capacity=max(256, self.tensors))
            observe_layer(path_of(path), layer, table.buffer)
            self._layers.append((weakref.ref(layer), table))

    def finish(self, sampled: bool) -> None:
        if not sampled:
            return
        by_table: dict[StatisticsTable, list[tuple[Slot, ScalingState]]] = {}
        for reference, table in self._layers:
            layer = reference()
            # `revert` makes a layer one in high precision.
            if not isinstance(layer, Fp8Linear) or not isinstance(layer.recipe, DelayedScaling):
                continue
            states = by_table.setdefault(table, [])
            states += [(slot, layer.state_of(role)) for role, slot in layer.slots.items()]
        for table, states in by_table.items():
            note_delayed(table, [slot for slot, _ in states], [s.amax_history for _, s in states])
            stale = torch.tensor([float(s.status in ("stale", "missing")) for _, s in states], device="cpu")
            table.note("scale_stale", [slot for slot, _ in states], stale)


def note_delayed(table: StatisticsTable, slots: list[Slot], histories: list[Tensor]) -> None:
    """Note the maximum of each amax history [calls], and whether a delayed scale cannot follow it."""
    peaks = torch.stack([history.amax() for history in histories]).double()
    follows = (peaks > 0) & torch.isfinite(peaks)
    table.note("history_amax", slots, peaks)
    table.note("scale_frozen", slots, (~follows).double())


class HighPrecisionLayers:
    """Observes amax and non-finite elements of linear layers that could be FP8, within the budget."""

    every_step = False
    is_paced = True
    recipe: Mapping[str, Any] = {}

    def __init__(self, model: nn.Module, tables: StatisticsTables, on_error: OnError) -> None:
        layers = [(path, layer) for path, layer in candidate_layers(model) if not is_foreign(layer)]
        self.tensors = len(ROLES) * len(layers)
        for path, layer in layers:
            table = tables.on(layer.weight.device, capacity=max(256, self.tensors))
            replace_observer(layer, HighPrecisionObserver(), {}, on_error, tables.reading_hooks)
            observe_layer(path_of(path), layer, table.buffer)

    def finish(self, sampled: bool) -> None:
        pass


class HighPrecisionExperts:
    """Observes amax and non-finite elements of experts that could be FP8, within the budget."""

    every_step = False
    recipe: Mapping[str, Any] = {}

    def __init__(self, model: nn.Module, tables: StatisticsTables, on_error: OnError) -> None:
        self.tensors = 0
        self._modules: list[weakref.ref[nn.Module]] = []
        for path, module in experts_in_high_precision(model):
            table = tables.on(next(module.parameters()).device)
            self.tensors += observe_plain_experts(path_of(path), module, table.buffer, on_error)
            self._modules.append(weakref.ref(module))
        self.is_paced = self.tensors > 0

    def close(self) -> None:
        """Remove the hooks."""
        for reference in self._modules:
            if (module := reference()) is not None:
                unobserve_plain_experts(module)

    def finish(self, sampled: bool) -> None:
        pass


def is_foreign(layer: nn.Module) -> bool:
    """Return whether another library quantises this layer, so that another source observes it."""
    return any(
        cls.__module__.partition(".")[0] in ("torchao", "transformer_engine") for cls in type(layer).__mro__
    )
