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
    for event in opened:
        routing.notify(event, Reason.REOPENED if event.reopened else Reason.OPENED)
        signals.event_opened.send(sender=Alert, event=event)
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
    seen = [event for event in live.unresolved(detection.generation) if event.seen_by]
    if any(_covers(event, detection.finding) for event in seen if event.kind in outranking):
        remaining.append(detection)
        return
    event = _come_back(live, detection)
    if event is None:
        other = _cause_seen_by_another_rule(live, detection)
        if other is not None:
            was_opened_now = any(event.pk == other.pk for event in opened)
            _add_evidence(other, detection, notifies=not was_opened_now)
            return
        event = _create(live, detection)
    if event is not None:
        live.add(event)
        opened.append(event)


def _covers(event: Alert, finding: ConditionChange) -> bool:
    """Return whether an alert of a kind that outranks a finding's has its cause."""
    return not rules.kind_of(event.kind).names_tensors or evidence.overlaps(event, finding)


def _completed(waiting: Detection, update: Detection) -> Detection:
    if not _is_end_of(update, waiting):
        return waiting
    finding = ConditionChange(**{**asdict(update.finding), "update": False})
    return Detection(waiting.rule, finding, waiting.stream, waiting.generation)


def _same_cause(live: RunAlerts, detection: Detection) -> Alert | None:
    """The unresolved alert that a finding belongs to.

    A kind that names tensors may have several causes at once, told apart by their onsets.
    """
    for event in live.unresolved():
        if detection.further_holder in event.seen_by:
            return event
    for event in live.unresolved():
        if event.rule_id != detection.rule.pk:
            continue
        if detection.holder in event.seen_by:
            return event
        if detection.finding.update or event.generation != detection.generation:
            continue
        if not rules.kind_of(detection.rule.kind).names_tensors or evidence.overlaps(
            event, detection.finding
        ):
            return event
    return None


def _cause_seen_by_another_rule(live: RunAlerts, detection: Detection) -> Alert | None:
    """The unresolved alert of another rule about the same tensors, whose onset is near.

    A rule of a person has alerts of its own. So has one that orders something, or whose alerts go elsewhere
    or escalate differently: that would not happen otherwise.
    """
    if not rules.kind_of(detection.rule.kind).names_tensors or detection.rule.kind == RuleKind.THRESHOLD:
        return None
    for event in live.unresolved(detection.generation):
        is_other = event.rule_id not in (None, detection.rule.pk) and event.kind != RuleKind.THRESHOLD
        if not event.seen_by or not is_other or not rules.kind_of(event.kind).names_tensors:
            continue
        about_the_same = evidence.overlaps(event, detection.finding) and evidence.is_about(
            event, detection.finding
        )
        if about_the_same and event.rule is not None and routing.treats_alike(event.rule, detection.rule):
            return event
    return None


def _add_evidence(event: Alert, detection: Detection, *, notifies: bool = True) -> None:
    """Make a finding of another rule further evidence of an alert, and the alert as severe as that rule.

    Args:
        notifies: whether a more severe alert is sent again; false if it has not been sent yet.
    """
    is_new = detection.further_holder not in event.seen_by
    if is_new:
        event.seen_by = [*event.seen_by, detection.further_holder]
    evidence.add_further(event, detection.rule, detection.finding)
    if rules.kind_of(detection.rule.kind).dates_others:
        _begin_earlier(event, detection.finding)
    is_worse = event.severity == Severity.WARNING and detection.rule.severity == Severity.CRITICAL
    if is_worse:
        event.severity = detection.rule.severity
        # Its own message first, as its title says; the other one has room for what made it more severe.
        more = f" {detection.rule.title}: {detection.finding.message}"[: evidence.MESSAGE_LENGTH // 2]
        event.message = f"{event.message[: evidence.MESSAGE_LENGTH - len(more)]}{more}"
    event.save(update_fields=["seen_by", "evidence", "severity", "message", "onset_step"])
    if is_new:
        lifecycle.write(event, EntryKind.UPDATED, text=f"{detection.rule.title}: {detection.finding.message}")
    if is_worse and notifies:
        lifecycle.send_again(event)
        routing.notify(event, Reason.WORSE)


def _join(event: Alert, detection: Detection) -> None:
    """Add the finding to an alert: another rank that sees the same, or more tensors."""
    if detection.further_holder in event.seen_by:
        _add_evidence(event, detection)
        return
    if detection.holder not in event.seen_by:
        event.seen_by = [*event.seen_by, detection.holder]
    before = int(event.evidence.get("tensors_over", 0))
    evidence.complete(event, detection.finding)
    if "tensors" in detection.finding.evidence:
        _begin_earlier(event, detection.finding)
    event.save(update_fields=["seen_by", "evidence", "message", "value", "onset_step"])
    # Not each tensor is an entry: a cause may reach hundreds.
    if before and event.evidence["tensors_over"] >= 2 * before:
        lifecycle.write(event, EntryKind.UPDATED, text=event.message)


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


def _reopened(event: Alert, detection: Detection) -> Alert | None:
    if not lifecycle.reopen(event, text=_came_back(detection)):
        return None
    event.seen_by, event.severity = [detection.holder], detection.rule.severity
    event.save(update_fields=["seen_by", "severity"])
    return event


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
    event = Alert.objects.filter(**same, evidence__own_onset=detection.finding.onset_step).first()
    created = False
    if event is None:
        event, created = Alert.objects.get_or_create(
            **same, onset_step=finding.onset_step, defaults=_fields(run, detection, finding)
        )
    if created:
        lifecycle.note_opened(event)
        return event
    # The object that others of this transaction have changed, if there is one.
    event = next((other for other in live.lasting() if other.pk == event.pk), event)
    if not event.seen_by:
        # It ended for those that saw it, e.g. for another rank.
        return _reopened(event, detection)
    # A person has resolved what another detector still sees.
    event.seen_by = [*event.seen_by, detection.holder]
    event.save(update_fields=["seen_by"])
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


def _begin_earlier(event: Alert, finding: ConditionChange) -> None:
    """Let an alert begin at a finding's onset if that is earlier. The caller saves it."""
    onset = evidence.first_onset(finding)
    if onset >= event.onset_step:
        return
    same = Alert.objects.filter(
        run=event.run_id, kind=event.kind, rule_name=event.rule_name, generation=event.generation
    )
    if same.filter(onset_step=onset).exists():
        return
    event.evidence = {"own_onset": event.onset_step, **event.evidence}
    event.onset_step = onset


def _leave(live: RunAlerts, end: Detection) -> None:
    """The detector no longer sees the condition; the alert is resolved when none does."""
    for event in live.lasting():
        holders = [end.further_holder, *([end.holder] if event.rule_id == end.rule.pk else [])]
        gone = [other for other in holders if other in event.seen_by]
        _without(event, gone, step=end.finding.step)
        if gone and event.seen_by and not held_by(event, end.rule.pk):
            text = f"{end.rule.title} has ended; other conditions last."
            lifecycle.write(event, EntryKind.UPDATED, text=text)


def held_by(event: Alert, rule: int) -> list[Any]:
    """The entries of `Alert.seen_by` of a rule's detectors."""
    own = [holder for holder in event.seen_by if len(holder) == 2 and event.rule_id == rule]
    return own + [holder for holder in event.seen_by if len(holder) > 2 and holder[2] == rule]


def _end_streams(live: RunAlerts, ended: Mapping[str, str]) -> None:
    for event in live.lasting() if ended else ():
        gone = [holder for holder in event.seen_by if holder[0] in ended]
        _without(event, gone, ended[gone[0][0]] if gone else "")


def _continue_streams(live: RunAlerts, continued: Collection[str]) -> list[Alert]:
    """Open what a person has resolved, and lasts in the next start of the training. Returns these alerts."""
    return [
        event
        for event in (live.lasting() if continued else ())
        if event.state == AlertState.RESOLVED
        and any(holder[0] in continued for holder in event.seen_by)
        and lifecycle.reopen(event, text="The training was continued, and the condition lasts.")
    ]


def _without(
    event: Alert, holders: Collection[Sequence[Any]], reason: str = "", step: int | None = None
) -> None:
    if not holders:
        return
    event.seen_by = [holder for holder in event.seen_by if holder not in holders]
    event.save(update_fields=["seen_by"])
    if not event.seen_by:
        lifecycle.resolve(event, step=step, reason=reason)


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
