"""From findings to events: one per run and kind while the condition lasts, however many detectors see it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.alerts import evidence, outbox, rules
from fp8scope_dashboard.alerts.detectors import Finding
from fp8scope_dashboard.alerts.models import DetectorState, Event, EventState, Rule, RuleAction
from fp8scope_dashboard.control.commands import fall_back
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

MESSAGE_LENGTH = 500


def apply(run: Run, found: Sequence[tuple[Rule, Finding]], states: Sequence[DetectorState]) -> list[Event]:
    """Open and resolve the events that findings call for; returns those opened, with their deliveries queued.

    Call it under the run's lock, in the transaction that stores the detectors' states. A finding opens no
    event while one of its kind, or of a kind that outranks it, is unresolved; nor one that was there before.
    """
    order = list(rules.KINDS)
    opened = []
    for rule, finding in sorted(found, key=lambda one: (one[1].step, order.index(one[0].kind))):
        if finding.opened:
            event = _open(run, rule, finding)
            if event is not None:
                opened.append(event)
        elif not _seen_elsewhere(rule, states):
            _resolve(run, rule.kind)
    for event in opened:
        outbox.enqueue(event)
        if event.rule is not None and event.rule.action == RuleAction.FALLBACK:
            fall_back(event)
    if found:
        transaction.on_commit(lambda: run_changed(run.id, run.project_id, "alert", found[-1][1].step))
    return opened


def _open(run: Run, rule: Rule, finding: Finding) -> Event | None:
    holding = [rule.kind, *(kind.name for kind in rules.KINDS.values() if rule.kind in kind.outranks)]
    unresolved = Event.objects.filter(run=run, kind__in=holding).exclude(state=EventState.RESOLVED)
    if unresolved.exists():
        return None
    event, created = Event.objects.get_or_create(
        run=run,
        kind=rule.kind,
        onset_step=finding.onset_step,
        defaults={
            "rule": rule,
            "severity": rule.severity,
            "step": finding.step,
            "step_time": _time_of(run, finding.step),
            "value": finding.value,
            "threshold": finding.threshold,
            "message": finding.message[:MESSAGE_LENGTH],
            "evidence": evidence.gather(run, rule.kind, finding),
        },
    )
    return event if created else None


def _seen_elsewhere(rule: Rule, states: Sequence[DetectorState]) -> bool:
    """Whether this rule's detector still sees the condition in another writer's stream."""
    return any(state.state.get(str(rule.pk), {}).get("open") for state in states)


def _resolve(run: Run, kind: str) -> None:
    unresolved = Event.objects.filter(run=run, kind=kind).exclude(state=EventState.RESOLVED)
    unresolved.update(state=EventState.RESOLVED, resolved_at=timezone.now())


def _time_of(run: Run, step: int) -> datetime | None:
    times = queries.scalar(run.id, "loss", first=step, last=step).times
    if not len(times) or np.isnat(times[0]):
        return None
    moment: datetime = times[0].astype("datetime64[us]").item()
    return moment.replace(tzinfo=UTC)
