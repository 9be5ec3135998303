"""Streaming detectors: pure functions from a state and new points to a new state and findings."""

from fp8scope_dashboard.alerts.detectors.base import NAMED, SAME_CAUSE, Finding, State
from fp8scope_dashboard.alerts.detectors.baseline import above_baseline, restarted
from fp8scope_dashboard.alerts.detectors.loss import LossDetector, divergence, not_finite, spike
from fp8scope_dashboard.alerts.detectors.saturation import overflow_rates, saturation
from fp8scope_dashboard.alerts.detectors.threshold import threshold

__all__ = [
    "NAMED",
    "SAME_CAUSE",
    "Finding",
    "LossDetector",
    "State",
    "above_baseline",
    "divergence",
    "not_finite",
    "overflow_rates",
    "restarted",
    "saturation",
    "spike",
    "threshold",
]
