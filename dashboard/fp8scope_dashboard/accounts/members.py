"""The members of a project, and their roles. A project keeps at least one administrator."""

from __future__ import annotations

from typing import Final, cast

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Membership, Project, Role, Scope, User
from fp8scope_dashboard.accounts.people import PeopleError
from fp8scope_dashboard.accounts.signals import access_ended, access_restored
from fp8scope_dashboard.accounts.tokens import UNEXPIRED

Ended = dict[str, list[int]]
"""The ids of what ended, or was taken over, when a person left: `tokens`, and what the receivers add."""

MAX_MEMBERS: Final = 1_000
LAST_ADMIN: Final = (
    "{name} is the only administrator of this project. Make another member an administrator first."
)


@transaction.atomic
def add_member(project: Project, name: str, role: Role) -> Membership:
    """Make an existing user a member.

    Raises:
        PeopleError: there is no active user of that name, or they are a member already.
    """
    _lock(project)
    user = User.objects.filter(username=name.strip(), is_active=True).first()
    if user is None:
        raise PeopleError(
            f"There is no user “{name.strip()[:150]}”. Check capitalisation. An administrator of the server "
            "creates accounts, on this page or with fp8scope admin invite."
        )
    if Membership.objects.filter(project=project, user=user).exists():
        raise PeopleError(f"{user.username} is a member already: change the role in the list.")
    if Membership.objects.filter(project=project).count() >= MAX_MEMBERS:
        raise PeopleError(f"The project has {MAX_MEMBERS} members, which is the maximum.")
    return Membership.objects.create(project=project, user=user, role=role)


@transaction.atomic
def change_role(membership: Membership, role: Role, *, may_be_last: bool = False) -> Ended:
    """Change the role of a member. A viewer loses their links, and the tokens that do more than read.

    Args:
        may_be_last: let the project be without an administrator; those of the server remain.

    Raises:
        PeopleError: it would leave the project without an administrator.
    """
    _lock(membership.project)
    if role != Role.ADMIN and not may_be_last:
        _keep_an_admin(membership)
    Membership.objects.filter(pk=membership.pk).update(role=role)
    if role != Role.VIEWER or membership.role == Role.VIEWER:
        return {}
    writing = live_tokens(membership).exclude(scopes=[Scope.READ.value])
    return _end(membership, list(writing.values_list("pk", flat=True)), None)


def live_tokens(membership: Membership) -> QuerySet[ApiToken]:
    """The tokens of a member that work."""
    return ApiToken.objects.filter(
        UNEXPIRED, project=membership.project_id, created_by=membership.user_id, revoked_at=None
    )


@transaction.atomic
def remove_member(
    membership: Membership, keep_for: User | None = None, *, may_be_last: bool = False
) -> Ended:
    """Remove a member, and revoke their tokens and links. Everything else that they made stays.

    Args:
        keep_for: the person who takes over the tokens and links, which then go on.
        may_be_last: let the project be without an administrator; those of the server remain.

    Raises:
        PeopleError: it would leave the project without an administrator.
    """
    _lock(membership.project)
    if not may_be_last:
        _keep_an_admin(membership)
    Membership.objects.filter(pk=membership.pk).delete()
    return _end(membership, list(live_tokens(membership).values_list("pk", flat=True)), keep_for)


@transaction.atomic
def restore_member(project: Project, user: User, role: Role, ended: Ended, *, revoked: bool) -> None:
    """Undo `remove_member` or `change_role`: the role of before, and the tokens and links of before.

    Args:
        revoked: whether these were revoked. What somebody took over and revoked since stays revoked.
    """
    _lock(project)
    Membership.objects.update_or_create(project=project, user=user, defaults={"role": role})
    tokens = ApiToken.objects.filter(project=project, pk__in=ended.get("tokens", []))
    works_again = {"revoked_at": None} if revoked else {}
    tokens.update(created_by=user, **works_again)
    access_restored.send(sender=Membership, project=project, user=user, ended=ended, works_again=works_again)


def _end(membership: Membership, tokens: list[int], keep_for: User | None) -> Ended:
    """Revoke these tokens, or let them go on as those of `keep_for`; likewise what receivers know of."""
    project, user = membership.project, membership.user
    chosen = ApiToken.objects.filter(pk__in=tokens)
    if keep_for is None:
        chosen.update(revoked_at=timezone.now())
    else:
        chosen.update(created_by=keep_for)
    ended = {"tokens": tokens}
    for _, more in access_ended.send(sender=Membership, project=project, user=user, keep_for=keep_for):
        ended |= cast(Ended, more)
    return ended


def _lock(project: Project) -> None:
    """One change at a time: of two administrators who remove each other, one stays."""
    Project.objects.select_for_update().get(pk=project.pk)


def _keep_an_admin(membership: Membership) -> None:
    admins = Membership.objects.filter(project=membership.project_id, role=Role.ADMIN)
    if not admins.exclude(pk=membership.pk).exists() and admins.filter(pk=membership.pk).exists():
        raise PeopleError(LAST_ADMIN.format(name=membership.user.username))
