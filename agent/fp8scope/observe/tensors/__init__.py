"""The sources of tensor statistics: one for each kind of layer, and one for the optimizer.

A source binds tensors to rows of the tables when a model is watched, and writes these rows while it trains;
see `base.Source`. Only this package knows the layers of other libraries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fp8scope.observe.tensors.activations import LayerInputs, Trail
from fp8scope.observe.tensors.attention import AttentionLogits, note_logits
from fp8scope.observe.tensors.base import OnError, TensorSource, unwrapped
from fp8scope.observe.tensors.buffers import SAMPLED_STATISTICS, StatisticsTable, StatisticsTables
from fp8scope.observe.tensors.experts import Routers, note_load
from fp8scope.observe.tensors.exponents import ExponentLayers
from fp8scope.observe.tensors.fp8_experts import ExpertLayers
from fp8scope.observe.tensors.layers import Fp8Layers, HighPrecisionExperts, HighPrecisionLayers
from fp8scope.observe.tensors.optimizer_state import OptimizerState
from fp8scope.observe.tensors.reduced_gradients import ReducedGradients
from fp8scope.observe.tensors.shadow import ShadowLayers
from fp8scope.observe.tensors.torchao import Float8Layers
from fp8scope.observe.tensors.transformer_engine import TransformerEngineLayers
from fp8scope_kernels import EXPERT_TENSORS, Recipe
from fp8scope_kernels.convert import Selection

__all__ = [
    "SAMPLED_STATISTICS",
    "StatisticsTable",
    "StatisticsTables",
    "TensorSource",
    "Watching",
    "note_load",
    "note_logits",
    "sources_of",
]


@dataclass(frozen=True, kw_only=True)
class Watching:
    """Options of `Run.watch`."""

    shadow: Recipe | None = None
    readiness: bool = False
    include: Selection | None = None
    scaler: Any = None
    expert_tensors: int = EXPERT_TENSORS


def sources_of(
    model: nn.Module, optimizer: Optimizer | None, tables: StatisticsTables, how: Watching, on_error: OnError
) -> Iterator[Callable[[], TensorSource]]:
    """Yield the constructors of the sources for this model. Each may fail without the others."""
    model = unwrapped(model)
    yield lambda: Fp8Layers(model, tables)
    yield lambda: ExpertLayers(model, tables, how.expert_tensors)
    yield lambda: Float8Layers(model, tables, on_error)
    yield lambda: TransformerEngineLayers(model, tables, on_error)
    shadow = how.shadow
    if shadow is None and how.readiness:
        yield lambda: ExponentLayers(model, tables, on_error, include=how.include, scaler=how.scaler)
    elif shadow is None:
        yield lambda: HighPrecisionLayers(model, tables, on_error)
    else:
        yield lambda: ShadowLayers(model, tables, on_error, shadow, include=how.include, scaler=how.scaler)
    yield lambda: HighPrecisionExperts(model, tables, on_error)
    yield lambda: ReducedGradients(model, tables, on_error)
    if optimizer is not None:
        yield lambda: OptimizerState(model, optimizer, tables, on_error)
    trail = Trail()
    yield lambda: LayerInputs(model, tables, trail, on_error)
    yield lambda: AttentionLogits(tables, trail, on_error)
    yield lambda: Routers(model, tables, on_error)
