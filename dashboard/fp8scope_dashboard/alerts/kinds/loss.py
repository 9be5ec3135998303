"""Rules for the loss."""

from __future__ import annotations

from fp8scope_dashboard.alerts.kinds.base import KindDefinition, Parameter, points

LOSS_NOT_FINITE = KindDefinition(
    name="loss_not_finite",
    severity="critical",
    description="The loss is NaN or infinite.",
    parameters={"recover": points(20, "Finite losses in a row that end it.")},
    # All other conditions of such a training are consequences.
    outranks=(
        "loss_spike",
        "loss_divergence",
        "above_baseline",
        "grad_norm",
        "tensor_not_finite",
        "saturation_rate",
        "saturation_rise",
        "underflow_rate",
        "underflow_rise",
        "scale_frozen",
        "scale_stale",
        "scale_jump",
        "amax_growth",
        "noise_growth",
        "kurtosis_growth",
        "logit_growth",
        "router_collapse",
        "update_growth",
    ),
)
LOSS_SPIKE = KindDefinition(
    name="loss_spike",
    severity="warning",
    description="The loss is far above its recent values, for several steps in a row.",
    parameters={
        "z": Parameter(6.0, 3.0, 100.0, "Robust standard deviations above the median of recent losses."),
        "fraction": Parameter(0.15, 0.001, 10.0, "Least height above the median, relative to it."),
        "points": points(
            3, "Steps that it must last; at least two points in a row where not every step is logged."
        ),
        "window": Parameter(50, 10, 10_000, "Recent points that a loss is compared with.", whole=True),
        "recover": points(10, "Points in a row below half of that height that end it."),
    },
)
LOSS_DIVERGENCE = KindDefinition(
    name="loss_divergence",
    severity="critical",
    description="The loss has risen far from its lowest level and stays there, or keeps rising.",
    parameters={
        "fraction": Parameter(0.2, 0.001, 10.0, "Least rise, relative to the lowest level."),
        "sigmas": Parameter(8.0, 3.0, 100.0, "Least rise, in standard deviations of the loss's level."),
        "points": points(10, "Points in a row above the limit that open it, or below half that end it."),
        "span": Parameter(21, 2, 1_000, "Points whose median is the level of the loss.", whole=True),
        "settle": Parameter(
            200, 50, 10_000, "Points without a further rise that end it, at a new level.", whole=True
        ),
    },
    outranks=("loss_spike", "above_baseline"),
    begins_as=("loss_spike", "above_baseline"),
)
ABOVE_BASELINE = KindDefinition(
    name="above_baseline",
    severity="warning",
    description="The loss exceeds its baseline's by more than twice the project's margin, and by "
    "more than seeds differ.",
    parameters={
        "block": Parameter(
            2, 1, 10_000, "Least points whose mean is compared; more where noise is correlated.", whole=True
        ),
        "recover": points(10, "Blocks in a row within the margin that end it."),
    },
)

LOSS_KINDS = (LOSS_NOT_FINITE, LOSS_DIVERGENCE, LOSS_SPIKE, ABOVE_BASELINE)
