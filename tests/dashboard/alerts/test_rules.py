"""Parameters of rules: defaults, bounds, and errors that say what to do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.alerts.rules import KINDS, RuleError, saved_parameters, validate

NAMES = [(kind.name, name) for kind in KINDS.values() for name in kind.parameters]


def test_it_works() -> None:
    defaults = {"fraction": 0.15, "points": 3, "window": 50, "recover": 10}
    assert validate("loss_spike", {"z": 8}) == {"z": 8.0, **defaults}


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_defaults_lie_in_their_bounds(kind: str, name: str) -> None:
    parameter = KINDS[kind].parameters[name]
    assert parameter.low <= parameter.default <= parameter.high
    assert validate(kind, {name: parameter.low})[name] == parameter.low
    assert validate(kind, {name: parameter.high})[name] == parameter.high


@pytest.mark.parametrize(("kind", "name"), NAMES)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -1e300, 1e300, "6", None, True, [], pytest.param(10**400, id="huge")],
)
def test_the_error_for_an_invalid_parameter_names_its_bounds(kind: str, name: str, value: object) -> None:
    with pytest.raises(RuleError, match=name):
        validate(kind, {name: value})


def test_refuses_a_fractional_count() -> None:
    with pytest.raises(RuleError, match="whole number from 1"):
        validate("loss_spike", {"points": 2.5})


def test_the_error_for_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RuleError, match="loss_spike"):
        validate("nothing", {})
    with pytest.raises(RuleError, match="window"):
        validate("loss_spike", {"zz": 1})


@given(st.sampled_from(NAMES), st.floats(allow_nan=True, allow_infinity=True))
def test_accepted_parameters_are_within_bounds(chosen: tuple[str, str], value: float) -> None:
    kind, name = chosen
    parameter = KINDS[kind].parameters[name]
    try:
        accepted = validate(kind, {name: value})[name]
    except RuleError:
        assert not parameter.low <= value <= parameter.high or (parameter.whole and value != int(value))
    else:
        assert parameter.low <= accepted <= parameter.high


def test_a_rule_saved_by_another_version_keeps_what_is_known() -> None:
    kept = saved_parameters("saturation_rise", {"z": 20.0, "points": -1, "gone": 3.0})
    assert kept == {**validate("saturation_rise", {}), "z": 20.0}


def test_outranking_has_no_cycles() -> None:
    order = list(KINDS)
    for kind in KINDS.values():
        for lesser in kind.outranks:
            assert order.index(lesser) > order.index(kind.name)
