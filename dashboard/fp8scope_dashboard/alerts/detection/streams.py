"""Run the detectors of a project's rules over the rows of one stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from uuid import UUID

import numpy as np

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detection import custom_rules
from fp8scope_dashboard.alerts.detectors import (
    ConditionChange,
    LossDetector,
    ScalarRows,
    State,
    TensorFacts,
    TensorRows,
    amax_growth,
    data_wait,
    divergence,
    grad_norm,
    kurtosis_growth,
    logit_growth,
    memory_creep,
    noise_growth,
    not_finite,
    router_collapse,
    saturation,
    saturation_rise,
    scale_frozen,
    scale_jump,
    scale_stale,
    spike,
    tensor_not_finite,
    tensor_rows,
    throughput_drop,
    underflow,
    underflow_rise,
    update_growth,
)
from fp8scope_dashboard.alerts.detectors.scalars import TIMES
from fp8scope_dashboard.alerts.detectors.tensor_rows import UNKNOWN_PATIENCE
from fp8scope_dashboard.alerts.models import Rule, RuleKind
from fp8scope_dashboard.diagnosis.tensors import LARGEST, scaling_of
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry.codec import ChunkData

# The key of the state that the detectors of tensors share, beside the ids of rules.
TENSORS = "tensors"
# Of a scale that must follow within `n` calls, so many histories may pass: a step may have several calls.
HISTORIES = 4
MIN_PATIENCE = 64

LOSS_DETECTORS: Mapping[str, LossDetector] = {
    "loss_not_finite": not_finite,
    "loss_divergence": divergence,
    "loss_spike": spike,
}
# Other ranks than the lowest log the loss of their own part of the data: only these rules apply to them.
ANY_RANK = ("loss_not_finite",)

TensorFunction = Callable[[State, TensorRows, Mapping[str, float]], tuple[State, list[ConditionChange]]]
ScalarFunction = Callable[[State, ScalarRows, Mapping[str, float]], tuple[State, list[ConditionChange]]]


@dataclass(frozen=True)
class TensorDetector:
    """A detector with the statistics that it needs; of rows without them it is not called."""

    detect: TensorFunction
    needs: tuple[str, ...]


TENSOR_DETECTORS: Mapping[str, TensorDetector] = {
    "tensor_not_finite": TensorDetector(tensor_not_finite, ("nonfinite", "numel")),
    "saturation_rate": TensorDetector(saturation, ("saturated", "numel")),
    "saturation_rise": TensorDetector(saturation_rise, ("saturated", "numel")),
    "underflow_rate": TensorDetector(underflow, ("underflow", "numel")),
    "underflow_rise": TensorDetector(underflow_rise, ("underflow", "numel")),
    "scale_frozen": TensorDetector(scale_frozen, ("amax", "scale")),
    "scale_stale": TensorDetector(scale_stale, ("amax", "scale")),
    "scale_jump": TensorDetector(scale_jump, ("amax", "scale")),
    "amax_growth": TensorDetector(amax_growth, ("amax",)),
    "noise_growth": TensorDetector(noise_growth, ("sq_error", "sq_signal")),
    "kurtosis_growth": TensorDetector(kurtosis_growth, ("kurtosis",)),
    "logit_growth": TensorDetector(logit_growth, ("logit_bound",)),
    "router_collapse": TensorDetector(router_collapse, ("load_imbalance",)),
    "update_growth": TensorDetector(update_growth, ("update_ratio",)),
}
SCALAR_DETECTORS: Mapping[str, ScalarFunction] = {
    "grad_norm": grad_norm,
    "throughput_drop": throughput_drop,
    "data_wait": data_wait,
    "memory_creep": memory_creep,
}
SCALARS_READ = ("grad_norm", "step_seconds", *TIMES, "memory_allocated", "memory_anonymous", "memory_rss")
STATISTICS_READ = ("numel", "amax", "scale", "saturated", "underflow", "nonfinite")
SAMPLED_READ = ("sq_error", "sq_signal", "kurtosis", "logit_bound", "load_imbalance", "update_ratio")


def columns_read(enabled: Collection[Rule]) -> tuple[set[str], set[str]]:
    """The scalars and the statistics that the detectors of rules read."""
    kinds = {rule.kind for rule in enabled}
    scalars, statistics = custom_rules.columns_read(enabled)
    scalars |= {"loss", *(SCALARS_READ if kinds & set(SCALAR_DETECTORS) else ())}
    if kinds & {*TENSOR_DETECTORS, "scale_disagreement"}:
        statistics |= {*STATISTICS_READ, *SAMPLED_READ}
    return scalars, statistics


def facts_of(run: Run, catalogue: Sequence[int]) -> TensorFacts:
    """Return what is known of the tensors of a writer's catalogue, in its order.

    It is shared: do not change it.
    """
    return _facts(run.pk, tuple(catalogue), json.dumps(run.recipe, sort_keys=True))


# Stored tensors never change, and the recipe of a run hardly ever.
@lru_cache(maxsize=64)
def _facts(run_id: UUID, catalogue: tuple[int, ...], recipe: str) -> TensorFacts:
    if not catalogue:
        return TensorFacts.unknown([])
    stored = {
        index: (name, role, format)
        for index, name, role, format in Tensor.objects.filter(run=run_id).values_list(
            "index", "name", "role", "format"
        )
    }
    tensors = [stored.get(index, (f"tensor {index}", "", "")) for index in catalogue]
    read: dict[str, Any] = json.loads(recipe)
    scalings = [scaling_of(read, role) for _, role, _ in tensors]
    return TensorFacts(
        [name for name, _, _ in tensors],
        np.array([LARGEST.get(format.lower(), np.nan) for _, _, format in tensors], np.float64),
        np.array([scaling.margin for scaling in scalings], np.float64),
        np.array(
            [
                UNKNOWN_PATIENCE
                if scaling.kind != "delayed"
                else HISTORIES * scaling.history * scaling.interval + MIN_PATIENCE
                for scaling in scalings
            ],
            np.int64,
        ),
        np.array([scaling.kind != "blocks" for scaling in scalings], bool),
    )


def detect(
    enabled: Collection[Rule], states: State, data: ChunkData, facts: TensorFacts, *, leads: bool
) -> list[tuple[Rule, ConditionChange]]:
    """The findings of all rules in the next rows of a stream. Updates `states`, by the rules' ids.

    Args:
        leads: whether the stream is of the lowest rank.
    """
    scalars = ScalarRows(data.steps, data.scalars, data.logged)
    tensors: TensorRows | None = None
    changes: list[tuple[Rule, ConditionChange]] = []
    for rule in enabled:
        key, parameters = str(rule.pk), rules.saved_parameters(rule.kind, rule.parameters)
        before: State = states.get(key, {})
        findings: list[ConditionChange] = []
        if rule.kind in LOSS_DETECTORS:
            if leads or rule.kind in ANY_RANK:
                steps, losses = scalars.points("loss")
                states[key], findings = LOSS_DETECTORS[rule.kind](before, steps, losses, parameters)
        elif rule.kind in SCALAR_DETECTORS:
            states[key], findings = SCALAR_DETECTORS[rule.kind](before, scalars, parameters)
        elif rule.kind in TENSOR_DETECTORS:
            if tensors is None:
                states[TENSORS], tensors = tensor_rows(
                    states.get(TENSORS, {}), data.steps, data.statistics, facts
                )
            detector = TENSOR_DETECTORS[rule.kind]
            if len(tensors.steps) and tensors.has(*detector.needs):
                states[key], findings = detector.detect(before, tensors, parameters)
        elif rule.kind == RuleKind.THRESHOLD:
            states[key], findings = custom_rules.detect(rule, before, data, facts.names, leads)
        changes += [(rule, finding) for finding in findings]
    return changes
