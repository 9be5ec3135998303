"""Open and resolve events from findings: one event per run and kind while the condition lasts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from django.db import transaction

from fp8scope_dashboard.alerts import evidence, life, outbox, rules, signals
from fp8scope_dashboard.alerts.detectors import Finding
from fp8scope_dashboard.alerts.models import DetectorState, Event, EventState, Rule
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

MESSAGE_LENGTH = 500


def apply(run: Run, findings: Sequence[tuple[Rule, Finding]], states: Sequence[DetectorState]) -> list[Event]:
    """Open and resolve events from findings. Returns the opened events; their deliveries are queued.

    Call it under the run's lock, in the transaction that stores the states of the detectors. A finding does
    not open an event while one of the same kind, or of a kind that outranks it, is unresolved. The same onset
    never opens a second event.
    """
    order = list(rules.KINDS)
    opened = []
    for rule, finding in sorted(findings, key=lambda pair: (pair[1].step, order.index(pair[0].kind))):
        if finding.opened:
            event = _open(run, rule, finding)
            if event is not None:
                opened.append(event)
        elif not _seen_elsewhere(rule, states):
            _resolve(run, rule, finding.step)
    for event in opened:
        outbox.enqueue(event)
        signals.event_opened.send(sender=Event, event=event)
    if findings:
        transaction.on_commit(lambda: run_changed(run.id, run.project_id, "alert", findings[-1][1].step))
    return opened


def _open(run: Run, rule: Rule, finding: Finding) -> Event | None:
    mine = Event.objects.filter(run=run, kind=rule.kind, rule_name=rule.name)
    outranking = [kind.name for kind in rules.KINDS.values() if rule.kind in kind.outranks]
    of_others = Event.objects.filter(run=run, kind__in=outranking)
    if (mine | of_others).filter(state__in=life.UNRESOLVED).exists():
        return None
    last = mine.select_related("run").order_by("-id").first()
    if last is not None and _comes_back(last, finding):
        text = f"The condition came back at step {finding.onset_step}: {finding.message}"
        return last if life.reopen(last, text=text) else None
    event, created = Event.objects.get_or_create(
        run=run,
        kind=rule.kind,
        rule_name=rule.name,
        onset_step=finding.onset_step,
        defaults={
            "rule": rule,
            "severity": rule.severity,
            "step": finding.step,
            "step_time": _time_of(run, finding.step),
            "value": finding.value,
            "threshold": finding.threshold,
            "message": finding.message[:MESSAGE_LENGTH],
            "evidence": evidence.gather(run, rule, finding),
        },
    )
    if not created:
        return None
    life.note_opened(event)
    return event


def _comes_back(last: Event, finding: Finding) -> bool:
    """Whether a finding is the condition of an alert that ended shortly before."""
    if last.state != EventState.RESOLVED or last.resolved_step is None:
        return False
    return 0 <= finding.onset_step - last.resolved_step <= life.REOPEN_STEPS


def _seen_elsewhere(rule: Rule, states: Sequence[DetectorState]) -> bool:
    """Whether the rule's detector still sees the condition in the stream of another writer."""
    return any(state.state.get(str(rule.pk), {}).get("open") for state in states)


def _resolve(run: Run, rule: Rule, step: int) -> None:
    events = Event.objects.filter(run=run, kind=rule.kind, rule_name=rule.name, state__in=life.UNRESOLVED)
    for event in events.select_related("run"):
        life.resolve(event, step=step)


def _time_of(run: Run, step: int) -> datetime | None:
    times = queries.scalar(run.id, "loss", first=step, last=step).times
    if not len(times) or np.isnat(times[0]):
        return None
    moment: datetime = times[0].astype("datetime64[us]").item()
    return moment.replace(tzinfo=UTC)
