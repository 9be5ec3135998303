"""Open, complete and resolve alerts from findings: one unresolved alert per run and cause.

Findings of one rule that belong together are one alert. So are findings of several rules about the same
tensors: the first one opens the alert, the others become further evidence of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.db import transaction
from django.db.models import Q

from fp8scope_dashboard.alerts import evidence, lifecycle, rules, signals
from fp8scope_dashboard.alerts.delivery import routing
from fp8scope_dashboard.alerts.detectors import SAME_CAUSE, ConditionChange
from fp8scope_dashboard.alerts.detectors.base import began
from fp8scope_dashboard.alerts.growth import since_it_grew
from fp8scope_dashboard.alerts.models import (
    Alert,
    AlertState,
    EntryKind,
    Reason,
    Rule,
    RuleKind,
    Severity,
)
from fp8scope_dashboard.alerts.run_alerts import RunAlerts
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

# Findings that wait for the end of an alert that outranks them; further ones are dropped.
MAX_WAITING = 64
# An alert is the beginning of another one if it began at most SAME_CAUSE steps before that, or this many
# times the steps that it took to find that. A loss may be above its baseline for long before it diverges.
TIMES = 2


@dataclass(frozen=True)
class Detection:
    """A finding of a rule's detector.

    Attributes:
        stream: the sequence of rows that the detector reads. Each has a name of its own.
        generation: the start of the training that an alert belongs to; see generations.py.
    """

    rule: Rule
    finding: ConditionChange
    stream: str
    generation: str

    @property
    def holder(self) -> list[Any]:
        """The entry in `Alert.seen_by` of the rule's own alert."""
        return [self.stream, self.finding.onset_step]

    @property
    def further_holder(self) -> list[Any]:
        """The entry in `Alert.seen_by` of another rule's alert, whose further evidence this is."""
        return [*self.holder, self.rule.pk]


@dataclass(frozen=True)
class Applied:
    """The opened alerts, and the findings that wait for the end of another alert, as JSON types."""

    opened: list[Alert]
    waiting: list[dict[str, Any]]


def apply(
    run: Run,
    detections: Sequence[Detection],
    *,
    waiting: Sequence[Mapping[str, Any]] = (),
    ended: Mapping[str, str] | None = None,
    continued: Collection[str] = (),
) -> Applied:
    """Open, complete and resolve the alerts of a run. The deliveries of opened alerts are queued.

    Call it under the run's lock, in the transaction that stores the states of the detectors. Generations are
    independent: an alert of one holds no finding of another. Within a generation, a finding opens no alert
    while its rule has an unresolved one of the same cause; it is added to that alert. While an alert of a
    kind that outranks it is unresolved, it waits. If another rule has an unresolved alert about the same
    tensors, it becomes further evidence of that: its channels are notified again only if it is more severe.

    Args:
        waiting: the findings that have waited since earlier calls.
        ended: why streams have ended, by name. Their conditions end too.
        continued: streams that another start of the training continues. What a person has resolved in them,
            and still lasts, opens again.
    """
    opened: list[Alert] = []
    live = RunAlerts(run)
    # The end of a stream is not the moment to open what has waited in it.
    restored = [detection for detection in _restored(run, waiting) if detection.stream not in (ended or {})]
    queue = [*restored, *sorted(detections, key=_order)]
    remaining: list[Detection] = []
    for detection in queue:
        if detection.finding.opened:
            grown = replace(detection, finding=since_it_grew(run, detection.rule, detection.finding))
            _opened_or_kept(live, grown, opened, remaining)
        else:
            remaining = [other for other in remaining if not _is_end_of(detection, other)]
            _leave(live, detection)
    remaining = [detection for detection in remaining if detection.stream not in (ended or {})]
    _end_streams(live, ended or {})
    opened += _continue_streams(live, continued)
    # What waited for alerts that have just been resolved.
    still_kept: list[Detection] = []
    for detection in remaining:
        _opened_or_kept(live, detection, opened, still_kept)
    for alert in opened:
        routing.notify(alert, Reason.REOPENED if alert.reopened else Reason.OPENED)
        signals.alert_opened.send(sender=Alert, alert=alert)
    if detections or opened:
        step = max(
            (detection.finding.step for detection in detections), default=opened[-1].step if opened else 0
        )
        transaction.on_commit(lambda: run_changed(run.id, run.project_id, "alert", step))
    return Applied(opened, [_as_json(detection) for detection in still_kept[:MAX_WAITING]])


def _order(detection: Detection) -> tuple[int, int]:
    """Kinds that outrank others come first among findings of the same step."""
    return detection.finding.step, list(rules.KINDS).index(detection.rule.kind)


def _is_end_of(end: Detection, waiting: Detection) -> bool:
    return (end.rule.pk, end.holder) == (waiting.rule.pk, waiting.holder)


def _opened_or_kept(
    live: RunAlerts, detection: Detection, opened: list[Alert], remaining: list[Detection]
) -> None:
    same = _same_cause(live, detection)
    if same is not None:
        # Without a detector that sees it, a person has opened it again.
        comes_back = not same.seen_by and not detection.finding.update
        _join(same, detection)
        if comes_back and lifecycle.open_again(same, text=_came_back(detection)):
            opened.append(same)
        return
    if detection.finding.update:
        # Its alert waits or was resolved by a person.
        remaining[:] = [_completed(other, detection) for other in remaining]
        return
    outranking = [kind.name for kind in rules.KINDS.values() if detection.rule.kind in kind.outranks]
    # No detector sees imported alerts any more.
    seen = [alert for alert in live.unresolved(detection.generation) if alert.seen_by]
    if any(_covers(alert, detection.finding) for alert in seen if alert.kind in outranking):
        remaining.append(detection)
        return
    alert = _come_back(live, detection)
    if alert is None:
        other = _cause_seen_by_another_rule(live, detection)
        if other is not None:
            was_opened_now = any(alert.pk == other.pk for alert in opened)
            _add_evidence(other, detection, notifies=not was_opened_now)
            return
        alert = _create(live, detection)
    if alert is not None:
        live.add(alert)
        opened.append(alert)


def _covers(alert: Alert, finding: ConditionChange) -> bool:
    """Return whether an alert of a kind that outranks a finding's has its cause."""
    return not rules.kind_of(alert.kind).names_tensors or evidence.overlaps(alert, finding)


def _completed(waiting: Detection, update: Detection) -> Detection:
    if not _is_end_of(update, waiting):
        return waiting
    finding = ConditionChange(**{**asdict(update.finding), "update": False})
    return Detection(waiting.rule, finding, waiting.stream, waiting.generation)


def _same_cause(live: RunAlerts, detection: Detection) -> Alert | None:
    """The unresolved alert that a finding belongs to.

    A kind that names tensors may have several causes at once, told apart by their onsets.
    """
    for alert in live.unresolved():
        if detection.further_holder in alert.seen_by:
            return alert
    for alert in live.unresolved():
        if alert.rule_id != detection.rule.pk:
            continue
        if detection.holder in alert.seen_by:
            return alert
        if detection.finding.update or alert.generation != detection.generation:
            continue
        if not rules.kind_of(detection.rule.kind).names_tensors or evidence.overlaps(
            alert, detection.finding
        ):
            return alert
    return None


def _cause_seen_by_another_rule(live: RunAlerts, detection: Detection) -> Alert | None:
    """The unresolved alert of another rule about the same tensors, whose onset is near.

    A rule of a person has alerts of its own. So has one that gives a command, or whose alerts go elsewhere
    or escalate differently: that would not happen otherwise.
    """
    if not rules.kind_of(detection.rule.kind).names_tensors or detection.rule.kind == RuleKind.THRESHOLD:
        return None
    for alert in live.unresolved(detection.generation):
        is_other = alert.rule_id not in (None, detection.rule.pk) and alert.kind != RuleKind.THRESHOLD
        if not alert.seen_by or not is_other or not rules.kind_of(alert.kind).names_tensors:
            continue
        about_the_same = evidence.overlaps(alert, detection.finding) and evidence.is_about(
            alert, detection.finding
        )
        if about_the_same and alert.rule is not None and routing.treats_alike(alert.rule, detection.rule):
            return alert
    return None


def _add_evidence(alert: Alert, detection: Detection, *, notifies: bool = True) -> None:
    """Make a finding of another rule further evidence of an alert, and the alert as severe as that rule.

    Args:
        notifies: whether a more severe alert is sent again; false if it has not been sent yet.
    """
    is_new = detection.further_holder not in alert.seen_by
    if is_new:
        alert.seen_by = [*alert.seen_by, detection.further_holder]
    evidence.add_further(alert, detection.rule, detection.finding)
    if rules.kind_of(detection.rule.kind).dates_others:
        _begin_earlier(alert, detection.finding)
    is_worse = alert.severity == Severity.WARNING and detection.rule.severity == Severity.CRITICAL
    if is_worse:
        alert.severity = detection.rule.severity
        # Its own message first, as its title says; the other one has room for what made it more severe.
        more = f" {detection.rule.title}: {detection.finding.message}"[: evidence.MESSAGE_LENGTH // 2]
        alert.message = f"{alert.message[: evidence.MESSAGE_LENGTH - len(more)]}{more}"
    alert.save(update_fields=["seen_by", "evidence", "severity", "message", "onset_step"])
    if is_new:
        lifecycle.write(alert, EntryKind.UPDATED, text=f"{detection.rule.title}: {detection.finding.message}")
    if is_worse and notifies:
        lifecycle.send_again(alert)
        routing.notify(alert, Reason.WORSE)


def _join(alert: Alert, detection: Detection) -> None:
    """Add the finding to an alert: another rank that sees the same, or more tensors."""
    if detection.further_holder in alert.seen_by:
        _add_evidence(alert, detection)
        return
    if detection.holder not in alert.seen_by:
        alert.seen_by = [*alert.seen_by, detection.holder]
    before = int(alert.evidence.get("tensors_over", 0))
    evidence.complete(alert, detection.finding)
    if "tensors" in detection.finding.evidence:
        _begin_earlier(alert, detection.finding)
    alert.save(update_fields=["seen_by", "evidence", "message", "value", "onset_step"])
    # Not each tensor is an entry: a cause may reach hundreds.
    if before and alert.evidence["tensors_over"] >= 2 * before:
        lifecycle.write(alert, EntryKind.UPDATED, text=alert.message)


def _come_back(live: RunAlerts, detection: Detection) -> Alert | None:
    """The rule's last alert, reopened, if its condition ended shortly before."""
    if not live.has_any:
        return None
    last = (
        Alert.objects.filter(
            run=live.run, rule=detection.rule, generation=detection.generation, state=AlertState.RESOLVED
        )
        .exclude(resolved_step=None)
        .select_related("run")
        .order_by("-resolved_step", "-id")
        .first()
    )
    onset = detection.finding.onset_step
    if last is None or not evidence.shares_tensors(last, detection.finding):
        return None
    if not 0 <= onset - (last.resolved_step or 0) <= lifecycle.REOPEN_STEPS:
        return None
    return _reopened(last, detection)


def _reopened(alert: Alert, detection: Detection) -> Alert | None:
    if not lifecycle.reopen(alert, text=_came_back(detection)):
        return None
    alert.seen_by, alert.severity = [detection.holder], detection.rule.severity
    alert.save(update_fields=["seen_by", "severity"])
    return alert


def _came_back(detection: Detection) -> str:
    return f"The condition came back at step {detection.finding.onset_step:,}: {detection.finding.message}"


def _create(live: RunAlerts, detection: Detection) -> Alert | None:
    run = live.run
    same = {
        "run": run,
        "kind": detection.rule.kind,
        "rule_name": detection.rule.name,
        "generation": detection.generation,
    }
    finding = _since_its_beginning(run, detection)
    if not live.has_any:
        first = Alert.objects.create(
            **same, onset_step=finding.onset_step, **_fields(run, detection, finding)
        )
        lifecycle.note_opened(first)
        return first
    alert = Alert.objects.filter(**same, evidence__own_onset=detection.finding.onset_step).first()
    created = False
    if alert is None:
        alert, created = Alert.objects.get_or_create(
            **same, onset_step=finding.onset_step, defaults=_fields(run, detection, finding)
        )
    if created:
        lifecycle.note_opened(alert)
        return alert
    # The object that others of this transaction have changed, if there is one.
    alert = next((other for other in live.lasting() if other.pk == alert.pk), alert)
    if not alert.seen_by:
        # It ended for those that saw it, e.g. for another rank.
        return _reopened(alert, detection)
    # A person has resolved what another detector still sees.
    alert.seen_by = [*alert.seen_by, detection.holder]
    alert.save(update_fields=["seen_by"])
    return None


def _fields(run: Run, detection: Detection, finding: ConditionChange) -> dict[str, Any]:
    """The fields of a new alert, beside those that identify it."""
    return {
        "rule": detection.rule,
        "severity": detection.rule.severity,
        "step": finding.step,
        "step_time": _time_of(run, finding.step),
        "value": finding.value,
        "threshold": finding.threshold,
        "message": finding.message[: evidence.MESSAGE_LENGTH],
        "evidence": evidence.gather(run, detection.rule, finding),
        "seen_by": [detection.holder],
    }


def _since_its_beginning(run: Run, detection: Detection) -> ConditionChange:
    """A finding that opens an alert, from the earliest step at which its condition was seen.

    That is the onset of its first tensor, or of a condition that was its beginning (`Kind.begins_as`) and
    still lasted. The finding's own onset, by which its detector knows it, is kept as `own_onset`.
    """
    finding, kind = detection.finding, rules.kind_of(detection.rule.kind)
    earlier = Alert.objects.filter(
        Q(resolved_step__gte=finding.onset_step) | ~Q(seen_by=[]),
        run=run,
        kind__in=kind.begins_as,
        generation=detection.generation,
        onset_step__lt=finding.onset_step,
        onset_step__gte=finding.onset_step - max(SAME_CAUSE, TIMES * (finding.step - finding.onset_step)),
    )
    first = earlier.order_by("onset_step").first() if kind.begins_as else None
    onset, message = evidence.first_onset(finding), finding.message
    if first is not None:
        onset = first.onset_step
        told = began(finding.onset_step)
        message = message if told in message else f"{message} {told}"
        message = message.replace(told, began(onset, first.title))
    if onset == finding.onset_step:
        return finding
    own = {**finding.evidence, "own_onset": finding.onset_step}
    return replace(finding, onset_step=onset, message=message, evidence=own)


def _begin_earlier(alert: Alert, finding: ConditionChange) -> None:
    """Let an alert begin at a finding's onset if that is earlier. The caller saves it."""
    onset = evidence.first_onset(finding)
    if onset >= alert.onset_step:
        return
    same = Alert.objects.filter(
        run=alert.run_id, kind=alert.kind, rule_name=alert.rule_name, generation=alert.generation
    )
    if same.filter(onset_step=onset).exists():
        return
    alert.evidence = {"own_onset": alert.onset_step, **alert.evidence}
    alert.onset_step = onset


def _leave(live: RunAlerts, end: Detection) -> None:
    """The detector no longer sees the condition; the alert is resolved when none does."""
    for alert in live.lasting():
        holders = [end.further_holder, *([end.holder] if alert.rule_id == end.rule.pk else [])]
        gone = [other for other in holders if other in alert.seen_by]
        _without(alert, gone, step=end.finding.step)
        if gone and alert.seen_by and not held_by(alert, end.rule.pk):
            text = f"{end.rule.title} has ended; other conditions last."
            lifecycle.write(alert, EntryKind.UPDATED, text=text)


def held_by(alert: Alert, rule: int) -> list[Any]:
    """The entries of `Alert.seen_by` of a rule's detectors."""
    own = [holder for holder in alert.seen_by if len(holder) == 2 and alert.rule_id == rule]
    return own + [holder for holder in alert.seen_by if len(holder) > 2 and holder[2] == rule]


def _end_streams(live: RunAlerts, ended: Mapping[str, str]) -> None:
    for alert in live.lasting() if ended else ():
        gone = [holder for holder in alert.seen_by if holder[0] in ended]
        _without(alert, gone, ended[gone[0][0]] if gone else "")


def _continue_streams(live: RunAlerts, continued: Collection[str]) -> list[Alert]:
    """Open what a person has resolved, and lasts in the next start of the training. Returns these alerts."""
    return [
        alert
        for alert in (live.lasting() if continued else ())
        if alert.state == AlertState.RESOLVED
        and any(holder[0] in continued for holder in alert.seen_by)
        and lifecycle.reopen(alert, text="The training was continued, and the condition lasts.")
    ]


def _without(
    alert: Alert, holders: Collection[Sequence[Any]], reason: str = "", step: int | None = None
) -> None:
    if not holders:
        return
    alert.seen_by = [holder for holder in alert.seen_by if holder not in holders]
    alert.save(update_fields=["seen_by"])
    if not alert.seen_by:
        lifecycle.resolve(alert, step=step, reason=reason)


def _as_json(detection: Detection) -> dict[str, Any]:
    return {
        "rule": detection.rule.pk,
        "stream": detection.stream,
        "generation": detection.generation,
        "finding": asdict(detection.finding),
    }


def _restored(run: Run, waiting: Sequence[Mapping[str, Any]]) -> Iterator[Detection]:
    """The inverse of `_as_json`, without the findings of rules that are gone or switched off."""
    if not waiting:
        return
    enabled_rules = Rule.objects.filter(project=run.project_id, enabled=True).in_bulk(
        [item["rule"] for item in waiting]
    )
    for item in waiting:
        if item["rule"] in enabled_rules:
            finding = ConditionChange(**item["finding"])
            yield Detection(enabled_rules[item["rule"]], finding, item["stream"], item["generation"])


def _time_of(run: Run, step: int) -> datetime | None:
    times = queries.scalar(run.id, "loss", first=step, last=step).times
    if not len(times) or np.isnat(times[0]):
        return None
    moment: datetime = times[0].astype("datetime64[us]").item()
    return moment.replace(tzinfo=UTC)
