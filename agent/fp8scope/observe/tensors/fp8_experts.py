"""The source for experts whose products are FP8: a row for all of a layer, and for each where they are few.

The kernels count while they quantise, as those of other FP8 layers do. A mixture of many experts would need
more rows than all of its other tensors, so that rows of single experts have a limit.
"""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.observe.tensors.base import path_of
from fp8scope.observe.tensors.buffers import StatisticsTable, StatisticsTables
from fp8scope_kernels import (
    DelayedScaling,
    ExpertProducts,
    ExpertSlots,
    ExpertStates,
    fp8_experts,
    observe_experts,
)
from fp8scope_kernels.experts.observers import tensors_of_experts

logger = logging.getLogger("fp8scope")


class ExpertLayers:
    """Observes the FP8 products of experts. `most`: the most rows of single experts in this model."""

    every_step = False
    adds_up = True

    def __init__(self, model: nn.Module, tables: StatisticsTables, most: int) -> None:
        experts = list(fp8_experts(model))
        single = tensors_of_experts(experts)
        singly = single <= most
        if experts and not singly:
            logger.info(
                "%d tensors of single experts are counted together, layer by layer; "
                "FP8SCOPE_EXPERT_TENSORS=%d records each.", single, single,
            )  # fmt: skip
        self.recipe: Mapping[str, Any] = experts[0][1].recipe.to_dict() if experts else {}
        self.tensors = 0
        # The run must not keep the model alive.
        self._experts: list[tuple[weakref.ref[ExpertProducts], StatisticsTable]] = []
        for path, products in experts:
            table = tables.on(products.device)
            self.tensors += observe_experts(path_of(path), products, table.buffer, singly=singly)
            self._experts.append((weakref.ref(products), table))

    def finish(self, sampled: bool) -> None:
        for reference, table in self._experts if sampled else ():
            products = reference()
            if products is None or not isinstance(products.recipe, DelayedScaling):
                continue
            for role, slots in products.slots.items():
                _note_delayed(table, slots, products.state_of(role))


def _note_delayed(table: StatisticsTable, slots: ExpertSlots, states: ExpertStates) -> None:
    """Note the maximum of the amax histories, and whether a delayed scale cannot follow them.

    Experts that never had tokens have no history, and are none that cannot follow it.
    """
    peaks = states.amax_history.amax(1).double()
    called = states.calls > 0
    frozen = called & ~((peaks > 0) & torch.isfinite(peaks))
    is_stale = float(states.status in ("stale", "missing"))
    _note(
        table, [slots.layer], peaks.amax()[None], frozen.any()[None], torch.tensor([is_stale], device="cpu")
    )
    if slots.experts:
        own = [states.of(expert).status for expert in range(states.experts)]
        stale = torch.tensor([status in ("stale", "missing") for status in own], device="cpu")
        seen = torch.where(called, 0.0, torch.nan)
        _note(table, list(slots.experts), peaks + seen, frozen.double() + seen, stale)


def _note(table: StatisticsTable, slots: Any, peaks: Tensor, frozen: Tensor, stale: Tensor) -> None:
    table.note("history_amax", slots, peaks)
    table.note("scale_frozen", slots, frozen)
    table.note("scale_stale", slots, stale)
