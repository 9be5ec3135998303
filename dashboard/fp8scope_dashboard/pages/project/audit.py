"""The audit log of a project on its settings page, and undoing a change."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.custom_rules.audit import undo_rules
from fp8scope_dashboard.audit.log import NotUndoableError, actor_of, record
from fp8scope_dashboard.audit.member_changes import undo_member_change
from fp8scope_dashboard.audit.models import Action, Entry
from fp8scope_dashboard.audit.queries import READS
from fp8scope_dashboard.pages.access import POST, back_to, in_project, may
from fp8scope_dashboard.pages.address_values import whole_number

CHANGES_SHOWN: Final = 20
UNDO_NEEDS: Final = {
    Action.RULES: permissions.CHANGE_RULES,
    Action.MEMBER_CHANGED: permissions.CHANGE_MEMBERS,
    Action.MEMBER_REMOVED: permissions.CHANGE_MEMBERS,
}
"""The permission that undoing a change needs. Other changes are made again by hand."""
UNDO: Final = {
    Action.RULES: undo_rules,
    Action.MEMBER_CHANGED: undo_member_change,
    Action.MEMBER_REMOVED: undo_member_change,
}


def changes_shown(request: HttpRequest, project: Project) -> dict[str, Any]:
    """The context of the list of changes: the newest, or those before the one in `?changes_before=`."""
    entries = Entry.objects.filter(project=project).exclude(action__in=READS).order_by("-id")
    before = whole_number(request.GET.get("changes_before", ""))
    if before is not None:
        entries = entries.filter(pk__lt=before)
    shown = list(entries[: CHANGES_SHOWN + 1])
    changes = [
        (entry, entry.undone_at is None and _may_undo(request, project, entry))
        for entry in shown[:CHANGES_SHOWN]
    ]
    return {
        "changes": changes,
        "older_changes": shown[CHANGES_SHOWN - 1].pk if len(shown) > CHANGES_SHOWN else None,
        "changes_before": before,
    }


@in_project(permissions.CHANGE_RULES, methods=POST)
def change_undo(request: HttpRequest, project: Project, entry_id: int) -> HttpResponse:
    """Undo a change, and redirect back."""
    entry = Entry.objects.select_related("project").filter(project=project, pk=entry_id).first()
    if entry is None or entry.action not in UNDO:
        raise Http404("No such change.")
    if not _may_undo(request, project, entry):
        raise PermissionDenied(f"This requires the role {UNDO_NEEDS[Action(entry.action)].own.value}.")
    try:
        UNDO[Action(entry.action)](entry)
    except NotUndoableError as error:
        messages.error(request, str(error))
    else:
        label = Action(entry.action).label
        record(actor_of(request), project, Action.UNDONE, f"{label}: {entry.text}", entry=entry.pk)
        messages.success(request, f"Undone: {label}: {entry.text}.")
    return back_to(request, project, f"{reverse('settings', args=[project.slug])}#changes")


def _may_undo(request: HttpRequest, project: Project, entry: Entry) -> bool:
    needed = UNDO_NEEDS.get(Action(entry.action))
    return needed is not None and may(request, project, needed)
