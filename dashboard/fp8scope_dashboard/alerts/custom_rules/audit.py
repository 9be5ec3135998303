"""Changes of rules in the audit log, and undoing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.db import transaction

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.custom_rules.documents import RuleDocumentError, key_of, parse
from fp8scope_dashboard.alerts.custom_rules.store import RuleChange
from fp8scope_dashboard.alerts.models import Rule
from fp8scope_dashboard.audit.log import Actor, NotUndoableError, claim_undo, record
from fp8scope_dashboard.audit.models import Action, Entry

VERBS: Final = ("created", "changed", "removed")


def record_rules(actor: Actor, project: Project, changes: Sequence[RuleChange]) -> Entry | None:
    """Write one entry for all changes that were made together; none if nothing changed."""
    made = [change for change in changes if change.what != "unchanged"]
    if not made:
        return None
    titles = {verb: [f"“{change.title}”" for change in made if change.what == verb] for verb in VERBS}
    text = "; ".join(f"{verb} {', '.join(named)}" for verb, named in titles.items() if named)
    documents = [{"what": change.what, "before": change.before, "after": change.after} for change in made]
    return record(actor, project, Action.RULES, text, rules=documents)


@transaction.atomic
def undo_rules(entry: Entry) -> None:
    """Make the rules of an entry again what they were before.

    Raises:
        NotUndoableError: if it is undone already, or a rule or a channel is no longer there. Then nothing is
            changed.
    """
    claim_undo(entry)
    assert entry.project is not None, "rules are of a project"
    try:
        for change in reversed(entry.details["rules"]):
            _undo(entry.project, change)
    except RuleDocumentError as error:
        raise NotUndoableError(f"The rules cannot be restored: {error}") from error


def _undo(project: Project, change: dict[str, Any]) -> None:
    if change["what"] == "removed":
        rule_store.save(parse(project, change["before"]))
        return
    key = parse(project, change["after"]).key
    stored: Rule | None = next((rule for rule in rule_store.rules_in(project) if key_of(rule) == key), None)
    if stored is None:
        raise NotUndoableError(f"The rule “{key[1].partition(' ')[2]}” is no longer there.")
    if change["what"] == "created":
        rule_store.remove(stored)
    else:
        rule_store.save(parse(project, change["before"]), stored)
