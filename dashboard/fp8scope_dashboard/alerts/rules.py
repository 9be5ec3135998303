"""The kinds of rules: what each detects, its parameters, their defaults and bounds.

Plain data and pure functions. Where the defaults come from, and how often each kind is wrong on real runs,
is in docs/statistics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class RuleError(ValueError):
    """A rule's parameters cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Parameter:
    """A number that a rule takes, its bounds included in the range."""

    default: float
    low: float
    high: float
    help: str
    whole: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of rule. `outranks` names kinds that are not opened while an event of this one is open."""

    name: str
    severity: str
    description: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outranks: tuple[str, ...] = ()
    # Whether its evidence names tensors, so that their layers can be fallen back.
    names_tensors: bool = False


def _points(default: int, help: str) -> Parameter:
    return Parameter(default, 1, 100_000, help, whole=True)


LOSS_NOT_FINITE = Kind(
    "loss_not_finite",
    "critical",
    "The loss is NaN or infinite.",
    {"recover": _points(20, "Finite losses in a row after which it is over.")},
    # What else such a run does follows from this.
    outranks=("loss_spike", "loss_divergence", "above_baseline", "saturation_rate"),
)
LOSS_SPIKE = Kind(
    "loss_spike",
    "warning",
    "The loss is far above its recent values, for several steps in a row.",
    {
        "z": Parameter(6.0, 3.0, 100.0, "Robust standard deviations above the median of recent losses."),
        "points": _points(3, "Points in a row that must be that high."),
        "window": Parameter(50, 10, 10_000, "Recent points to hold a loss against.", whole=True),
        "recover": _points(10, "Points in a row back below half of that height after which it is over."),
    },
)
LOSS_DIVERGENCE = Kind(
    "loss_divergence",
    "critical",
    "The smoothed loss has risen from its minimum and stays there.",
    {
        "fraction": Parameter(0.02, 0.001, 10.0, "Least rise, relative to the minimum."),
        "sigmas": Parameter(8.0, 3.0, 100.0, "Least rise, in standard deviations of the smoothed loss."),
        "points": _points(20, "Points in a row above, and below again."),
        "span": Parameter(20, 2, 10_000, "Points over which the loss is smoothed.", whole=True),
    },
    outranks=("loss_spike", "above_baseline"),
)
ABOVE_BASELINE = Kind(
    "above_baseline",
    "warning",
    "The loss is above its baseline's by more than the project's margin (or than its seeds differ).",
    {
        "block": Parameter(2, 1, 10_000, "Points whose mean is compared at once.", whole=True),
        "recover": _points(10, "Blocks in a row back within the margin after which it is over."),
    },
)
SATURATION_RATE = Kind(
    "saturation_rate",
    "warning",
    "A tensor's elements are clipped to the format's range (or are NaN or infinite), step after step.",
    {
        "rate": Parameter(0.001, 0.0, 1.0, "Overflowed elements over all elements of a tensor."),
        "points": _points(10, "Observations in a row above that rate."),
        "warmup": Parameter(
            10, 0, 1_000_000, "First steps to ignore: scales are not settled yet.", whole=True
        ),
        "recover": _points(20, "Rows without any such tensor after which it is over."),
    },
    names_tensors=True,
)
# In the order in which findings of the same step are told: what outranks comes first.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (LOSS_NOT_FINITE, LOSS_DIVERGENCE, LOSS_SPIKE, ABOVE_BASELINE, SATURATION_RATE)
}


def kind_of(name: str) -> Kind:
    """The kind of this name.

    Raises:
        RuleError: there is none.
    """
    if name not in KINDS:
        raise RuleError(f"There is no rule of kind {name!r}; choose one of: {', '.join(KINDS)}.")
    return KINDS[name]


def validate(name: str, parameters: Mapping[str, Any]) -> dict[str, float]:
    """A kind's parameters, all of them, with the given ones in place of defaults.

    Raises:
        RuleError: an unknown kind or parameter, not a number, or out of bounds.
    """
    known = kind_of(name).parameters
    for given in parameters:
        if given not in known:
            raise RuleError(f"{name} has no parameter {given!r}; it takes: {', '.join(known)}.")
    return {key: _checked(key, one, parameters.get(key, one.default)) for key, one in known.items()}


def _checked(key: str, parameter: Parameter, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN lies in no range; whole numbers of any size compare without being converted.
    if number and parameter.low <= value <= parameter.high and (not parameter.whole or value == int(value)):
        return int(value) if parameter.whole else float(value)
    what = "a whole number" if parameter.whole else "a number"
    raise RuleError(
        f"{key} must be {what} from {parameter.low:g} to {parameter.high:g}, not {_short(value)}."
    )


def _short(value: Any) -> str:
    """The value as it was given; not all of it when it is long."""
    return repr(value)[:40]
