"""The kinds of alert rules: what each detects, its parameters, their defaults and bounds.

Plain data and pure functions. docs/statistics.md says where the defaults come from and how often each kind is
wrong on real runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class RuleError(ValueError):
    """The parameters of a rule are invalid; the message says what to change."""


@dataclass(frozen=True)
class Parameter:
    """A numeric parameter of a rule. The range includes its bounds."""

    default: float
    low: float
    high: float
    help: str
    whole: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of rule. While an event of this kind is open, no event of a kind in `outranks` opens."""

    name: str
    severity: str
    description: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outranks: tuple[str, ...] = ()
    # Whether its evidence names tensors, so that a command can compute their layers in BF16.
    names_tensors: bool = False
    # Whether a new project has a rule of this kind.
    is_default: bool = True


def _points(default: int, help: str) -> Parameter:
    return Parameter(default, 1, 100_000, help, whole=True)


LOSS_NOT_FINITE = Kind(
    "loss_not_finite",
    "critical",
    "The loss is NaN or infinite.",
    {"recover": _points(20, "Finite losses in a row that end it.")},
    # All other conditions of such a run are consequences.
    outranks=("loss_spike", "loss_divergence", "above_baseline", "saturation_rate"),
)
LOSS_SPIKE = Kind(
    "loss_spike",
    "warning",
    "The loss is far above its recent values, for several steps in a row.",
    {
        "z": Parameter(6.0, 3.0, 100.0, "Robust standard deviations above the median of recent losses."),
        "points": _points(3, "Points in a row that must be that high."),
        "window": Parameter(50, 10, 10_000, "Recent points that a loss is compared with.", whole=True),
        "recover": _points(10, "Points in a row below half of that height that end it."),
    },
)
LOSS_DIVERGENCE = Kind(
    "loss_divergence",
    "critical",
    "The smoothed loss has risen from its minimum and stays high.",
    {
        "fraction": Parameter(0.02, 0.001, 10.0, "Least rise, relative to the minimum."),
        "sigmas": Parameter(8.0, 3.0, 100.0, "Least rise, in standard deviations of the smoothed loss."),
        "points": _points(20, "Points in a row above the limit that open it, and below that end it."),
        "span": Parameter(20, 2, 10_000, "Points over which the loss is smoothed.", whole=True),
    },
    outranks=("loss_spike", "above_baseline"),
)
ABOVE_BASELINE = Kind(
    "above_baseline",
    "warning",
    "The loss is above its baseline's by more than the project's margin, or the spread of its seeds.",
    {
        "block": Parameter(2, 1, 10_000, "Points whose mean is compared.", whole=True),
        "recover": _points(10, "Blocks in a row within the margin that end it."),
    },
)
SATURATION_RATE = Kind(
    "saturation_rate",
    "warning",
    "Elements of a tensor are clipped to the format's range, NaN or infinite, for many steps in a row.",
    {
        "rate": Parameter(0.001, 0.0, 1.0, "Overflowed elements over all elements of a tensor."),
        "points": _points(10, "Observations in a row above that rate."),
        "warmup": Parameter(
            10, 0, 1_000_000, "First steps that are ignored, because scales are not settled yet.", whole=True
        ),
        "recover": _points(20, "Rows in a row without any such tensor that end it."),
    },
    names_tensors=True,
)
THRESHOLD = Kind(
    "threshold",
    "warning",
    "A rule of your own: a statistic, a condition and a value.",
    {
        "value": Parameter(0.0, -1e100, 1e100, "The limit. A factor must be above 1."),
        "points": Parameter(3, 1, 1_000, "Observations over which the condition must hold.", whole=True),
        "share": Parameter(1.0, 0.01, 1.0, "Share of them in which it must hold. 1: all, in a row."),
        "window": Parameter(
            50,
            2,
            100_000,
            "Observations over which the average is taken that 'rises', 'falls' and 'changes' compare with.",
            whole=True,
        ),
        "recover": _points(10, "Observations in a row without the condition that end it."),
    },
    names_tensors=True,
    is_default=False,
)
# In the order in which findings of the same step are applied: kinds that outrank others come first.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (LOSS_NOT_FINITE, LOSS_DIVERGENCE, LOSS_SPIKE, ABOVE_BASELINE, SATURATION_RATE, THRESHOLD)
}


def kind_of(name: str) -> Kind:
    """The kind with this name.

    Raises:
        RuleError: if there is none.
    """
    if name not in KINDS:
        raise RuleError(f"There is no rule of kind {name!r}; choose one of: {', '.join(KINDS)}.")
    return KINDS[name]


def validate(name: str, parameters: Mapping[str, Any]) -> dict[str, float]:
    """All parameters of a kind: the given ones, and the defaults of the others.

    Raises:
        RuleError: if the kind or a parameter is unknown, not a number, or out of bounds.
    """
    known = kind_of(name).parameters
    for given in parameters:
        if given not in known:
            raise RuleError(f"{name} has no parameter {given!r}; it takes: {', '.join(known)}.")
    return {
        key: _checked(key, parameter, parameters.get(key, parameter.default))
        for key, parameter in known.items()
    }


def _checked(key: str, parameter: Parameter, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is in no range. Integers of any size compare without conversion.
    if number and parameter.low <= value <= parameter.high and (not parameter.whole or value == int(value)):
        return int(value) if parameter.whole else float(value)
    what = "a whole number" if parameter.whole else "a number"
    raise RuleError(
        f"{key} must be {what} from {parameter.low:g} to {parameter.high:g}, not {_short(value)}."
    )


def _short(value: Any) -> str:
    """The value, cut off if it is long."""
    return repr(value)[:40]
