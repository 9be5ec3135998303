"""The data that is stored with an alert, so that its page does not depend on the run's telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import NAMED, SAME_CAUSE, ConditionChange
from fp8scope_dashboard.alerts.models import Alert, Rule
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import Series
from fp8scope_dashboard.text.numbers import json_number

# At most so many points of each series, from STEPS_BEFORE steps before the onset to the step of detection.
POINTS = 200
STEPS_BEFORE = 120
# Tensors whose series are stored; the finding names more.
TENSORS = 3
MESSAGE_LENGTH = 500
# What a finding says of its tensors.
OF_TENSORS = ("tensors", "tensors_over", "first")


def gather(run: Run, rule: Rule, finding: ConditionChange) -> dict[str, Any]:
    """The finding's evidence and the series around its onset, as JSON types.

    `series` and, if the run has a baseline, `baseline` are lists of {"name", "steps", "values"}, with NaN and
    infinities as the strings of docs/wire.md.
    """
    reach = max(STEPS_BEFORE, finding.step - finding.onset_step)
    first, last = finding.onset_step - reach, finding.step
    gathered: dict[str, Any] = dict(finding.evidence)
    shown = rules.kind_of(rule.kind)
    # A kind that reads several scalars says which one it found.
    scalar = gathered.pop("scalar", shown.shows)
    if shown.names_tensors:
        gathered["series"] = [
            *_own_series(run, rule, finding, first, last),
            _as_dict("loss", queries.scalar(run.id, "loss", first=first, last=last, points=POINTS)),
        ]
        return gathered
    gathered["series"] = [
        _as_dict(name, queries.scalar(run.id, name, first=first, last=last, points=POINTS))
        for name in dict.fromkeys((scalar, "loss"))
    ]
    if shown.shows != "loss":
        return gathered
    baseline = comparison_runs.baseline_runs(run)
    if baseline:
        read = queries.scalars([seed.id for seed in baseline], "loss", first=first, last=last, points=POINTS)
        # The finding's own `baseline`, if any, is a number: the baseline's loss.
        gathered["baseline_loss"] = gathered.pop("baseline", None)
        gathered["baseline"] = [_as_dict(seed.name, read[seed.id]) for seed in baseline if len(read[seed.id])]
    return gathered


def first_onset(finding: ConditionChange) -> int:
    """The step at which the condition of a finding began: that of its first tensor, if it has tensors."""
    first = finding.evidence.get("first")
    return finding.onset_step if first is None else min(finding.onset_step, int(first["onset_step"]))


def overlaps(alert: Alert, finding: ConditionChange) -> bool:
    """Return whether a finding of tensors has the cause of an alert.

    It began at most SAME_CAUSE steps apart.
    """
    last = int(alert.evidence.get("last_onset", alert.onset_step))
    return alert.onset_step - SAME_CAUSE <= finding.onset_step <= last + SAME_CAUSE


def shares_tensors(alert: Alert, finding: ConditionChange) -> bool:
    """Return whether a finding names a tensor of an alert; true if it names none at all."""
    if "tensors" not in finding.evidence:
        return True
    names = {tensor["name"] for tensor in alert.evidence.get("tensors", [])}
    return any(tensor["name"] in names for tensor in finding.evidence["tensors"])


def is_about(alert: Alert, finding: ConditionChange) -> bool:
    """Return whether a finding names largely the tensors of an alert: half of its modules are the alert's.

    Input, weight and gradient of one module leave their ranges together. Of many tensors the evidence names
    only the worst; then half of the layers must be the alert's.
    """
    ours, theirs = alert.evidence, finding.evidence
    if all(int(tensors.get("tensors_over", 0)) > NAMED for tensors in (ours, theirs)):
        mine, other = set(ours.get("layers", [])), set(theirs.get("layers", []))
        if mine and other:
            return 2 * len(mine & other) >= len(other)
    mine, other = _modules(ours), _modules(theirs)
    return bool(other) and 2 * len(mine & other) >= len(other)


def _modules(named: Mapping[str, Any]) -> set[Any]:
    return {tensor["name"].rpartition(".")[0] for tensor in named.get("tensors", [])}


def add_further(alert: Alert, rule: Rule, finding: ConditionChange) -> None:
    """Keep what another rule found about the same tensors: one entry for each rule, the latest."""
    entry: dict[str, Any] = {
        "kind": rule.kind,
        "title": rule.title,
        "severity": rule.severity,
        "onset_step": finding.onset_step,
        "step": finding.step,
        "message": finding.message[:MESSAGE_LENGTH],
        **{
            key: finding.evidence[key]
            for key in ("tensors", "tensors_over", "first")
            if key in finding.evidence
        },
    }
    others = [entry for entry in alert.evidence.get("further", []) if entry["title"] != rule.title]
    alert.evidence = {
        **alert.evidence,
        **_earlier_first(alert.evidence, finding.evidence),
        "further": [*others, entry],
        "last_onset": max(
            int(alert.evidence.get("last_onset", alert.onset_step)),
            int(finding.evidence.get("last_onset", 0)),
        ),
    }


def _earlier_first(before: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The first tensor of two evidences, as an entry; nothing if neither names it."""
    named = [entry["first"] for entry in (before, other) if entry.get("first")]
    return {"first": min(named, key=lambda first: int(first["onset_step"]))} if named else {}


def complete(alert: Alert, finding: ConditionChange) -> None:
    """Add the tensors of a finding to an alert that has the same cause; other findings change nothing."""
    tensors = finding.evidence.get("tensors")
    if tensors is None:
        return
    before = alert.evidence
    names = {tensor["name"] for tensor in tensors}
    others = [tensor for tensor in before.get("tensors", []) if tensor["name"] not in names]
    more = int(finding.evidence["tensors_over"]) >= int(before.get("tensors_over", 0))
    alert.evidence = {
        **before,
        **(finding.evidence if more else {}),
        **_earlier_first(before, finding.evidence),
        "tensors": [*tensors, *others][:NAMED],
        "last_onset": max(
            int(before.get("last_onset", alert.onset_step)), int(finding.evidence.get("last_onset", 0))
        ),
    }
    if more:
        alert.message, alert.value = finding.message[:MESSAGE_LENGTH], finding.value


def _own_series(
    run: Run, rule: Rule, finding: ConditionChange, first: int, last: int
) -> list[dict[str, Any]]:
    """The series that the rule reads, without the loss."""
    if rule.kind == "threshold" and not rule.tensors:
        if rule.statistic == "loss":
            return []
        series = queries.scalar(run.id, rule.statistic, first=first, last=last, points=POINTS)
        return [_as_dict(rule.statistic, series)]
    statistic = rule.statistic if rule.kind == "threshold" else rules.kind_of(rule.kind).shows
    if statistic == "overflow_rate":
        statistic = queries.overflow_name(queries.statistic_names(run.id)) or statistic
    return _tensor_series(run, finding, statistic, first, last)


def _tensor_series(
    run: Run, finding: ConditionChange, statistic: str, first: int, last: int
) -> list[dict[str, Any]]:
    names = [tensor["name"] for tensor in finding.evidence["tensors"][:TENSORS]]
    indices = dict(Tensor.objects.filter(run=run, name__in=names).values_list("name", "index"))
    return [
        {
            "tensor": name,
            **_as_dict(
                f"{name} {statistic}",
                queries.tensor_series(
                    run.id, indices[name], statistic, first=first, last=last, points=POINTS
                ),
            ),
        }
        for name in names
        if name in indices
    ]


def _as_dict(name: str, series: Series) -> dict[str, Any]:
    return {
        "name": name,
        "steps": series.steps.tolist(),
        "values": [json_number(value) for value in series.values.tolist()],
    }
