"""Look up the kinds of alert rules, and check the parameters of a rule.

docs/methods says where the defaults come from, and how often each kind is wrong on real runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8scope_dashboard.alerts.kinds import KINDS, KindDefinition, Parameter

__all__ = ["KINDS", "KindDefinition", "Parameter", "RuleError", "kind_of", "saved_parameters", "validate"]


class RuleError(ValueError):
    """The parameters of a rule are invalid; the message says what to change."""


def kind_of(name: str) -> KindDefinition:
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
    definitions = kind_of(name).parameters
    for given in parameters:
        if given not in definitions:
            raise RuleError(f"{name} has no parameter {given!r}; it takes: {', '.join(definitions)}.")
    return {
        key: _checked(key, parameter, parameters.get(key, parameter.default))
        for key, parameter in definitions.items()
    }


def saved_parameters(name: str, parameters: Mapping[str, Any]) -> dict[str, float]:
    """All parameters of a saved rule. What this version does not know, or no longer allows, has its default.

    A rule that another version saved must not end the judging of all runs of its project.

    Raises:
        RuleError: if the kind is unknown.
    """
    values: dict[str, float] = {}
    for key, parameter in kind_of(name).parameters.items():
        try:
            values[key] = _checked(key, parameter, parameters.get(key, parameter.default))
        except RuleError:
            values[key] = parameter.default
    return values


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
