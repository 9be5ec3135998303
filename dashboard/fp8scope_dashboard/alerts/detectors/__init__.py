"""Streaming detectors: pure functions from a state and new points to a new state and findings."""

from fp8scope_dashboard.alerts.detectors.amax_growth import amax_growth
from fp8scope_dashboard.alerts.detectors.base import NAMED, SAME_CAUSE, ConditionChange, State
from fp8scope_dashboard.alerts.detectors.baseline import above_baseline, restarted
from fp8scope_dashboard.alerts.detectors.divergence import divergence
from fp8scope_dashboard.alerts.detectors.early_signs import (
    kurtosis_growth,
    logit_growth,
    noise_growth,
    router_collapse,
    update_growth,
)
from fp8scope_dashboard.alerts.detectors.loss import LossDetector, not_finite
from fp8scope_dashboard.alerts.detectors.rank_scales import scale_disagreement
from fp8scope_dashboard.alerts.detectors.saturation import (
    overflow_rates,
    saturation,
    saturation_rise,
    tensor_not_finite,
    underflow,
    underflow_rise,
)
from fp8scope_dashboard.alerts.detectors.scalars import (
    ScalarRows,
    data_wait,
    grad_norm,
    memory_creep,
    throughput_drop,
)
from fp8scope_dashboard.alerts.detectors.scale import scale_frozen, scale_jump, scale_stale
from fp8scope_dashboard.alerts.detectors.spike import spike
from fp8scope_dashboard.alerts.detectors.tensor_rows import TensorFacts, TensorRows, tensor_rows
from fp8scope_dashboard.alerts.detectors.threshold import threshold

__all__ = [
    "NAMED",
    "SAME_CAUSE",
    "ConditionChange",
    "LossDetector",
    "ScalarRows",
    "State",
    "TensorFacts",
    "TensorRows",
    "above_baseline",
    "amax_growth",
    "data_wait",
    "divergence",
    "grad_norm",
    "kurtosis_growth",
    "logit_growth",
    "memory_creep",
    "noise_growth",
    "not_finite",
    "overflow_rates",
    "restarted",
    "router_collapse",
    "saturation",
    "saturation_rise",
    "scale_disagreement",
    "scale_frozen",
    "scale_jump",
    "scale_stale",
    "spike",
    "tensor_not_finite",
    "tensor_rows",
    "threshold",
    "throughput_drop",
    "underflow",
    "underflow_rise",
    "update_growth",
]
