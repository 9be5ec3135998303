"""Rules in words: labels of their parameters, and one sentence for each rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.models import Condition, Rule, RuleKind
from fp8scope_dashboard.pages import formatting, glossary

LABELS: Final[Mapping[str, str]] = {
    "z": "Height above the past",
    "points": "Points in a row",
    "window": "Length of the past",
    "recover": "Points until it ends",
    "fraction": "Least rise (share)",
    "sigmas": "Least rise (deviations)",
    "span": "Points in the average",
    "block": "Points in a block",
    "blocks": "Blocks in a row",
    "rate": "Rate",
    "rise": "Least rise",
    "warmup": "First points ignored",
    "factor": "Least factor",
    "share": "Share",
    "octaves": "Powers of two",
    "seconds": "Seconds",
    "agreed": "Points that agreed before",
    "value": "Value",
}


def label_of(parameter: str) -> str:
    """The label of a parameter's field."""
    return LABELS.get(parameter, parameter.replace("_", " ").capitalize())


def describe(rule: Rule) -> str:
    """What a rule reports, in one sentence."""
    if rule.kind != RuleKind.THRESHOLD:
        return rules.kind_of(rule.kind).description
    numbers = rules.validate(rule.kind, rule.parameters)
    subject = glossary.title(rule.statistic) if rule.statistic else ""
    if rule.tensors:
        subject += f" of {rule.tensors}"
    condition = str(Condition(rule.condition).label)
    if rule.condition != Condition.NOT_FINITE:
        condition += f" {formatting.number(numbers['value'])}"
    if rule.condition in (Condition.RISES_BY, Condition.FALLS_BY, Condition.CHANGES_BY_FACTOR):
        condition += f" against the average of {formatting.count(int(numbers['window']))} points"
    points, share = int(numbers["points"]), numbers["share"]
    if share < 1.0:
        how_often = f"in {formatting.number(100.0 * share)} % of {formatting.count(points)} points"
    else:
        how_often = f"at {formatting.count(points)} points in a row" if points > 1 else "at one point"
    return f"{subject} {condition}, {how_often}."
