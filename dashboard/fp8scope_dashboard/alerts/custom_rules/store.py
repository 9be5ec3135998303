"""Save, change and remove rules, and apply a whole list of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from django.db import connection, transaction

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.alert_updates import held_by
from fp8scope_dashboard.alerts.custom_rules.documents import Draft, RuleDocumentError, document_of, key_of
from fp8scope_dashboard.alerts.detection.locks import lock_states
from fp8scope_dashboard.alerts.models import RUN_WIDE, Alert, DetectorState, Rule, RuleKind

MAX_RULES: Final = 500
# A change of one of these, or of a parameter, starts the detector of a person's rule again. A built-in rule
# keeps what it has learned; with other parameters, its open alerts end with their conditions.
DEFINITION: Final = ("statistic", "tensors", "condition")
SAVED: Final = (
    *("run", "kind", "name", *DEFINITION, "severity", "parameters", "enabled", "action"),
    *("quiet_from", "quiet_to", "quiet_zone", "critical_breaks_quiet", "escalate_minutes"),
)


@dataclass(frozen=True)
class RuleChange:
    """The effect of a list of rules on one of them, before or after it is applied.

    Attributes:
        fields: what changes, by name: the present and the new value. Empty unless `what` is "changed".
        before: the rule's document as it was; None for a new rule.
        after: its document as it is; None for a removed rule.
    """

    what: Literal["created", "changed", "unchanged", "removed"]
    title: str
    fields: dict[str, tuple[Any, Any]]
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


def rules_in(project: Project) -> list[Rule]:
    """The rules of a project: built-in ones first, those of runs last."""
    stored = Rule.objects.filter(project=project).select_related("run").prefetch_related("channels")
    order = list(RuleKind.values)
    return sorted(stored, key=lambda rule: (rule.run_id is not None, order.index(rule.kind), rule.name))


@transaction.atomic
def save(draft: Draft, stored: Rule | None = None) -> Rule:
    """Save a draft as a new rule, or in place of a stored one of the same project.

    Raises:
        RuleDocumentError: if another rule has its name or its kind, or the project has MAX_RULES.
    """
    new = draft.rule
    # Two simultaneous requests must not save two rules of the same name.
    Project.objects.select_for_update().get(pk=new.project_id)
    others = Rule.objects.filter(project=new.project_id)
    if stored is not None:
        others = others.exclude(pk=stored.pk)
    if stored is None and others.count() >= MAX_RULES:
        raise RuleDocumentError((), f"The project has {MAX_RULES} rules. Remove one first.")
    if new.kind == RuleKind.THRESHOLD and others.filter(name=new.name).exists():
        raise RuleDocumentError(("name",), "Another rule of the project has this name.")
    if new.kind != RuleKind.THRESHOLD and any(
        key_of(other) == draft.key for other in others.filter(kind=new.kind)
    ):
        raise RuleDocumentError(("kind",), "There is a rule of this kind already: change that one.")
    if stored is not None and stored.kind != RuleKind.THRESHOLD and stored.run_id != new.run_id:
        raise RuleDocumentError(
            ("run",), "A built-in rule keeps its run. Add a rule of this kind for the run."
        )
    rule = stored or new
    if stored is not None:
        if not new.enabled:
            _close_alerts(stored, "The rule was switched off.")
        elif stored.kind == RuleKind.THRESHOLD and _definition(stored) != _definition(new):
            _close_alerts(stored, "The rule was changed.")
        for name in SAVED:
            setattr(stored, name, getattr(new, name))
    rule.save()
    rule.channels.set(draft.channels)
    rule.escalation_channels.set(draft.escalation_channels)
    return rule


@transaction.atomic
def switch(rule: Rule, *, on: bool) -> None:
    """Switch a rule on or off. The open alerts of one that is switched off are resolved."""
    rule.enabled = on
    rule.save(update_fields=["enabled"])
    if not on:
        _close_alerts(rule, "The rule was switched off.")


@transaction.atomic
def remove(rule: Rule) -> None:
    """Delete a rule. Its open alerts are resolved; all its alerts are kept.

    Raises:
        RuleDocumentError: if it is a project's rule of a built-in kind, which can only be switched off.
    """
    if rule.kind != RuleKind.THRESHOLD and rule.run_id is None:
        raise RuleDocumentError((), "A built-in rule cannot be removed. Switch it off instead.")
    _close_alerts(rule, "The rule was removed.")
    rule.delete()


@transaction.atomic
def apply(
    project: Project, drafts: Sequence[Draft], *, prune: bool = False, check: bool = False
) -> list[RuleChange]:
    """Create and change rules so that the project has these; applying them again changes nothing.

    Args:
        prune: also remove the rules that are not among them, except for the built-in ones of the project.
        check: change nothing, and return what would change.

    Raises:
        RuleDocumentError: as `save`; then nothing is changed.
    """
    stored = {key_of(rule): rule for rule in rules_in(project)}
    changes = []
    for draft in drafts:
        rule = stored.pop(draft.key, None)
        before = None if rule is None else document_of(rule)
        after = save(draft, rule)
        changes.append(change_of(after, before))
    removable = [rule for rule in stored.values() if rule.kind == RuleKind.THRESHOLD or rule.run_id]
    for rule in removable if prune else []:
        changes.append(RuleChange("removed", rule.title, {}, before=document_of(rule)))
        remove(rule)
    if check:
        transaction.set_rollback(True)
    return changes


def change_of(rule: Rule, before: dict[str, Any] | None) -> RuleChange:
    """Return what was done to a saved rule, which had the document `before`; None for a new rule."""
    after = document_of(rule)
    if before is None:
        return RuleChange("created", rule.title, {}, after=after)
    fields = {
        name: (before.get(name), after.get(name))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    }
    return RuleChange("changed" if fields else "unchanged", rule.title, fields, before, after)


def _definition(rule: Rule) -> list[Any]:
    return [*(getattr(rule, name) for name in DEFINITION), rule.run_id, sorted(rule.parameters.items())]


def _close_alerts(rule: Rule, reason: str) -> None:
    """Start the detectors of a rule again: end its conditions, and resolve alerts that have no other."""
    _forget(rule)
    of_project = Alert.objects.filter(run__project=rule.project_id).exclude(seen_by=[])
    for alert in of_project.select_related("run"):
        held = held_by(alert, rule.pk)
        if not held:
            continue
        alert.seen_by = [holder for holder in alert.seen_by if holder not in held]
        alert.save(update_fields=["seen_by"])
        if not alert.seen_by:
            lifecycle.resolve(alert, reason=reason)


def _forget(rule: Rule) -> None:
    """Remove the detector states of a rule, so that what lasts, and has just been closed, opens again."""
    # The locks of the evaluation.
    of_project = DetectorState.objects.filter(run__project=rule.project_id, writer=RUN_WIDE)
    lock_states(of_project.values_list("run_id", flat=True), waits=True)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE alerts_detectorstate AS states SET state = states.state - %(rule)s FROM runs_run AS run
            WHERE run.id = states.run_id AND run.project_id = %(project)s
                AND jsonb_exists(states.state, %(rule)s)
                AND (run.state IN ('running', 'silent') OR states.writer = %(wide)s)
            """,
            {"rule": str(rule.pk), "project": rule.project_id, "wide": RUN_WIDE},
        )
