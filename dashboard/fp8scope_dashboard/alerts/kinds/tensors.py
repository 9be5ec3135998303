"""Rules for the tensors. docs/methods/tensor_alarms.md has the formulas, and how often each is wrong."""

from __future__ import annotations

from fp8scope_dashboard.alerts.kinds.base import KindDefinition, Parameter, points
from fp8scope_dashboard.analysis.tensor_onsets import SETTLED_STEPS

RECOVER = "Rows in a row without the condition after which a tensor has recovered."


def _octaves(default: float, help: str) -> Parameter:
    return Parameter(default, 0.1, 100.0, f"{help} In powers of two.")


def _warmup(default: int, help: str) -> Parameter:
    return Parameter(default, 0, 1_000_000, help, whole=True)


TENSOR_NOT_FINITE = KindDefinition(
    name="tensor_not_finite",
    severity="critical",
    description="A tensor has NaN or infinite elements in several steps, in a row or often.",
    parameters={
        "points": points(3, "Observations in a row with such elements."),
        "recover": points(20, RECOVER),
    },
    outranks=("saturation_rate", "saturation_rise", "scale_frozen", "scale_jump"),
    names_tensors=True,
    shows="nonfinite_rate",
)
SATURATION_RATE = KindDefinition(
    name="saturation_rate",
    severity="warning",
    description="Elements of a tensor are clipped to the format's range, NaN or infinite, for many steps.",
    parameters={
        "rate": Parameter(0.001, 0.0, 1.0, "Overflowed elements over all elements of a tensor."),
        "points": points(10, "Observations in a row above that rate."),
        "warmup": Parameter(
            SETTLED_STEPS,
            0,
            1_000_000,
            "First steps that are ignored, because scales are not settled yet.",
            whole=True,
        ),
        "recover": points(20, "Rows in a row below the rate after which a tensor has recovered."),
    },
    outranks=("saturation_rise",),
    names_tensors=True,
    shows="overflow_rate",
)
SATURATION_RISE = KindDefinition(
    name="saturation_rise",
    severity="warning",
    description="Far more elements of a tensor overflow than in its own past.",
    parameters={
        "z": Parameter(11.0, 3.0, 100.0, "Mean falls of its logarithm above its lowest level."),
        "rise": Parameter(0.0003, 0.0, 1.0, "Least rise, in elements over all elements."),
        "points": points(10, "Observations in a row that must be that high."),
        "window": points(200, "Observations that the past reaches back, and before a tensor is judged."),
        "recover": points(20, RECOVER),
    },
    names_tensors=True,
    shows="overflow_rate",
)
UNDERFLOW_RATE = KindDefinition(
    name="underflow_rate",
    severity="warning",
    description="Most elements of a tensor become zero, for many steps.",
    parameters={
        "rate": Parameter(0.5, 0.0, 1.0, "Elements that become zero over all elements of a tensor."),
        "points": points(20, "Observations in a row above that rate."),
        "warmup": _warmup(SETTLED_STEPS, "First steps that are ignored, because scales are not settled yet."),
        "recover": points(20, RECOVER),
    },
    outranks=("underflow_rise",),
    names_tensors=True,
    shows="underflow_rate",
)
UNDERFLOW_RISE = KindDefinition(
    name="underflow_rise",
    severity="warning",
    description="Far more elements of a tensor become zero than in its own past.",
    parameters={
        "z": Parameter(11.0, 3.0, 100.0, "Mean falls of its logarithm above its lowest level."),
        "rise": Parameter(0.1, 0.0, 1.0, "Least rise, in elements over all elements."),
        "points": points(20, "Observations in a row that must be that high."),
        "window": points(200, "Observations that the past reaches back, and before a tensor is judged."),
        "recover": points(20, RECOVER),
    },
    names_tensors=True,
    shows="underflow_rate",
)
SCALE_FROZEN = KindDefinition(
    name="scale_frozen",
    severity="critical",
    description="A scale stays the same while the amax that it should follow moves.",
    dates_others=False,
    parameters={
        "octaves": _octaves(2.0, "How far the amax moves while the scale stays."),
        "points": points(5, "Observations in a row."),
        "recover": points(20, RECOVER),
    },
    names_tensors=True,
    shows="scale",
)
SCALE_STALE = KindDefinition(
    name="scale_stale",
    severity="warning",
    description="A scale was made for an amax that the tensor has not had for long.",
    parameters={
        "octaves": _octaves(6.0, "Distance of the amax from what the scale was made for."),
        "points": points(10, "Observations in a row, beyond the length of the amax history."),
        "recover": points(20, RECOVER),
    },
    names_tensors=True,
    shows="scale",
)
SCALE_JUMP = KindDefinition(
    name="scale_jump",
    severity="warning",
    description="A scale changes by orders of magnitude in one step.",
    parameters={
        "octaves": _octaves(8.0, "Least change between two observations."),
        "warmup": _warmup(100, "First steps that are ignored, because scales are not settled yet."),
        "points": points(1, "Observations in a row."),
        "recover": points(50, RECOVER),
    },
    names_tensors=True,
    shows="scale",
)
SCALE_DISAGREEMENT = KindDefinition(
    name="scale_disagreement",
    severity="critical",
    description="Ranks that had the same scale of a tensor have different ones.",
    parameters={
        "octaves": _octaves(0.1, "Least difference between two ranks."),
        "agreed": points(20, "Comparisons in which the ranks must have agreed before; one every 10 steps."),
        "points": points(3, "Comparisons in a row with a difference."),
        "recover": points(5, "Comparisons in a row without, after which a tensor has recovered."),
    },
    names_tensors=True,
    shows="scale",
)
AMAX_GROWTH = KindDefinition(
    name="amax_growth",
    severity="warning",
    description="The amax of few tensors grows by orders of magnitude over many steps: the late "
    "outliers of SwiGLU.",
    parameters={
        "octaves": _octaves(
            3.0, "Growth from the lowest level, beyond the median of tensors of the same role."
        ),
        "span": points(100, "Observations over which the amax is averaged."),
        "warmup": _warmup(500, "First observations of a tensor that are ignored."),
        "points": points(50, "Observations in a row above that growth."),
        "recover": points(100, RECOVER),
    },
    names_tensors=True,
    shows="amax",
)

# In the order in which findings of the same step are applied.
TENSOR_KINDS = (
    TENSOR_NOT_FINITE,
    SCALE_FROZEN,
    SATURATION_RATE,
    SATURATION_RISE,
    UNDERFLOW_RATE,
    UNDERFLOW_RISE,
    SCALE_STALE,
    SCALE_JUMP,
    SCALE_DISAGREEMENT,
    AMAX_GROWTH,
)
