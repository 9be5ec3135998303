"""Rules in words: labels of their parameters, and one sentence for each rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.models import Condition, Rule, RuleKind
from fp8scope_dashboard.pages import formatting, glossary

LABELS: Final[Mapping[str, str]] = {
    "z": "Deviations above the past",
    "points": "Points in a row",
    "window": "Points of the past",
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
    "settle": "Points until a new level",
}
# Where the same name means something else.
LABELS_OF_KIND: Final[Mapping[tuple[str, str], str]] = {
    ("data_wait", "points"): "Steps in the average",
    ("data_wait", "share"): "Share of the step",
    ("memory_creep", "points"): "Readings in a block",
    ("above_baseline", "recover"): "Blocks until it ends",
    ("scale_disagreement", "points"): "Comparisons in a row",
    ("scale_disagreement", "recover"): "Comparisons until it ends",
}
# The kinds whose value is a share of elements or of time.
SHARES: Final = frozenset(
    ["above_baseline", "saturation_rate", "saturation_rise", "underflow_rate", "underflow_rise", "data_wait"]
)


def label_of(parameter: str, kind: str = "") -> str:
    """The label of the field of a parameter of a kind."""
    label = LABELS_OF_KIND.get((kind, parameter)) or LABELS.get(parameter)
    return label or parameter.replace("_", " ").capitalize()


def amount(kind: str, value: float | None) -> str:
    """The value or the limit of an alert of this kind, with its unit; empty for None."""
    if value is None:
        return ""
    if kind in SHARES:
        return f"{formatting.number(100.0 * value)} %"
    # A limit in powers of two means a value in powers of two.
    if kind in rules.KINDS and "octaves" in rules.KINDS[kind].parameters and abs(value) < 64.0:
        return f"a factor of {formatting.number(2.0**value)}"
    if kind == RuleKind.MEMORY_CREEP:
        return f"{formatting.count(round(value / 2**20))} MiB"
    return formatting.number(value)


def describe(rule: Rule) -> str:
    """Return what a rule reports, in one sentence."""
    if rule.kind != RuleKind.THRESHOLD:
        return rules.kind_of(rule.kind).description
    numbers = rules.saved_parameters(rule.kind, rule.parameters)
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
