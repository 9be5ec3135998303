"""Rules for statistics that move before the loss does; docs/methods/early_signs.md has the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8scope_dashboard.alerts.kinds.base import KindDefinition, Parameter, points

# Healthy trainings of benchmarks/early_signs.py.
HEALTHY = 65


@dataclass(frozen=True)
class KnownError:
    """False alarms in HEALTHY trainings, and the upper end of the 95 % interval of their rate."""

    alarms: int
    at_most: float

    def __str__(self) -> str:
        return (
            f"False alarms: {self.alarms} in {HEALTHY} healthy small trainings (95 % interval: at most "
            f"{100 * self.at_most:.1f} %)."
        )


NONE, ONE = KnownError(0, 0.055), KnownError(1, 0.083)
KNOWN_ERRORS: Mapping[str, KnownError] = {
    "noise_growth": ONE,
    "kurtosis_growth": NONE,
    "logit_growth": NONE,
    "router_collapse": NONE,
    "update_growth": NONE,
}


def _sign(name: str, statistic: str, octaves: float, description: str) -> KindDefinition:
    return KindDefinition(
        name=name,
        severity="warning",
        description=f"{description} {KNOWN_ERRORS[name]}",
        parameters={
            "octaves": Parameter(octaves, 0.1, 100.0, "Least rise above its past. In powers of two."),
            "z": Parameter(5.0, 3.0, 100.0, "Mean absolute deviations of its logarithm above the average."),
            "window": points(20, "Sampled steps that the past reaches back, and before a tensor is judged."),
            "warmup": Parameter(
                10, 0, 100_000, "First sampled steps, which do not count as the past.", whole=True
            ),
            "points": points(3, "Sampled steps in a row that must be that high."),
            "recover": points(
                10, "Sampled steps in a row below the limit after which a tensor has recovered."
            ),
        },
        names_tensors=True,
        shows=statistic,
    )


NOISE_GROWTH = _sign(
    "noise_growth",
    "noise_to_signal",
    1.0,
    "Quantisation loses more of a tensor than in its own past.",
)
KURTOSIS_GROWTH = _sign("kurtosis_growth", "kurtosis", 1.0, "Outliers grow in the input of a layer.")
LOGIT_GROWTH = _sign("logit_growth", "logit_bound", 1.0, "The attention logits of a layer grow.")
ROUTER_COLLAPSE = _sign(
    "router_collapse",
    "load_imbalance",
    0.5,
    "A router shares the tokens out far less evenly than before.",
)
UPDATE_GROWTH = _sign(
    "update_growth", "update_ratio", 1.0, "Updates of a weight grow far above their own past."
)

# In the order in which findings of the same step are applied.
EARLY_SIGNS = (NOISE_GROWTH, KURTOSIS_GROWTH, LOGIT_GROWTH, ROUTER_COLLAPSE, UPDATE_GROWTH)
