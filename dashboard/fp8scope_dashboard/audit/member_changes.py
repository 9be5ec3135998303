"""Changes of a project's members in the audit log, and undoing them."""

from __future__ import annotations

from django.db import transaction

from fp8scope_dashboard.accounts import members
from fp8scope_dashboard.accounts.members import Ended
from fp8scope_dashboard.accounts.models import Membership, Role, User
from fp8scope_dashboard.audit.log import Actor, NotUndoableError, claim_undo, record
from fp8scope_dashboard.audit.models import Action, Entry


@transaction.atomic
def remove_member(actor: Actor, membership: Membership, keep_for: User | None) -> Entry:
    """Remove a member, see `members.remove_member`.

    Raises:
        PeopleError: it would leave the project without an administrator.
    """
    name, role, user = membership.user.username, membership.role, membership.user_id
    ended = members.remove_member(membership, keep_for)
    text = f"{name} ({role})"
    if any(ended.values()):
        text += f"; {counted(ended)} " + (
            "revoked" if keep_for is None else f"taken over by {keep_for.username}"
        )
    details = {"user": user, "role": role, "ended": ended, "revoked": keep_for is None}
    return record(actor, membership.project, Action.MEMBER_REMOVED, text, **details)


@transaction.atomic
def change_role(actor: Actor, membership: Membership, role: Role) -> Entry:
    """Change the role of a member, see `members.change_role`.

    Raises:
        PeopleError: it would leave the project without an administrator.
    """
    ended = members.change_role(membership, role)
    text = f"{membership.user.username}: {membership.role} → {role.value}"
    if any(ended.values()):
        text += f"; {counted(ended)} revoked"
    details = {"user": membership.user_id, "role": membership.role, "ended": ended, "revoked": True}
    return record(actor, membership.project, Action.MEMBER_CHANGED, text, **details)


@transaction.atomic
def undo_member_change(entry: Entry) -> None:
    """Give a person their role, tokens and links back.

    Raises:
        NotUndoableError: if it is undone already, or the account no longer exists or is deactivated.
    """
    claim_undo(entry)
    assert entry.project is not None, "members are of a project"
    user = User.objects.filter(pk=entry.details["user"], is_active=True).first()
    if user is None:
        raise NotUndoableError("The account no longer exists, or is deactivated.")
    role, ended = Role(entry.details["role"]), entry.details["ended"]
    members.restore_member(entry.project, user, role, ended, revoked=entry.details["revoked"])


def counted(ended: Ended) -> str:
    """In words: `2 tokens and 1 link`."""
    counts = [(name.removesuffix("s"), len(ids)) for name, ids in ended.items() if ids]
    return " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts)
