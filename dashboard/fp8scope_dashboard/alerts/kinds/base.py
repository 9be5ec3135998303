"""The definition of a kind of rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Parameter:
    """A numeric parameter of a rule. The range includes its bounds."""

    default: float
    low: float
    high: float
    help: str
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class KindDefinition:
    """A kind of rule. While an alert of this kind is open, no alert of a kind in `outranks` opens.

    If this kind names tensors, that holds only for tensors with overlapping onsets.
    """

    name: str
    severity: str
    description: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outranks: tuple[str, ...] = ()
    # Kinds whose condition may be the beginning of this one: while one lasts, an alert of this kind begins
    # where that began.
    begins_as: tuple[str, ...] = ()
    # Whether an alert of another kind begins where this condition does, once it is evidence of that alert. A
    # scale may stay the same for a while before it is wrong.
    dates_others: bool = True
    # Whether its evidence names tensors, so that a command can compute their layers in BF16.
    names_tensors: bool = False
    # The statistic of these tensors, or the scalar, that the evidence shows.
    shows: str = "loss"
    # Whether a new project has a rule of this kind, and whether it is switched on.
    is_default: bool = True
    enabled: bool = True


def points(default: int, help: str) -> Parameter:
    return Parameter(default, 1, 100_000, help, whole=True)
