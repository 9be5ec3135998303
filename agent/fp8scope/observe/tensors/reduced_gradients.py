"""Observes gradients that are averaged over the ranks in FP8: their cast, and the sum, in every step.

A reducer counts by itself once it is bound to rows. It may be made after the model is watched, so the end of
each step looks for new ones.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fp8scope.observe.tensors.base import OnError
from fp8scope.observe.tensors.buffers import StatisticsTables
from fp8scope_kernels.gradient_reduction import live_reducers


class ReducedGradients:
    """Binds the reducers of a model's gradients, unless the script has bound them itself."""

    every_step = True
    recipe: Mapping[str, Any] = {}

    def __init__(self, model: nn.Module, tables: StatisticsTables, on_error: OnError) -> None:
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._tables = tables
        self._on_error = on_error
        self.adds_up = False
        self.tensors = 0
        self._bind()

    def finish(self, sampled: bool) -> None:
        self._bind()

    def close(self) -> None:
        """Do nothing: the rows go with the reducer. Without it, a source without tensors is dropped."""

    def _bind(self) -> None:
        for reducer in live_reducers():
            if not reducer.is_observed and id(reducer.parameters[0]) in self._parameters:
                self.tensors += reducer.observe(self._tables.on(reducer.parameters[0].device).buffer)
                self.adds_up = True
