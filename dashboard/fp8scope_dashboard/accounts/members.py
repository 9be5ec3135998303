"""The members of a project, and their roles. A project keeps at least one administrator."""

from __future__ import annotations

from typing import Final

from django.db import transaction

from fp8scope_dashboard.accounts.models import Membership, Project, Role, User
from fp8scope_dashboard.accounts.people import PeopleError

MOST_MEMBERS: Final = 1_000
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
    if Membership.objects.filter(project=project).count() >= MOST_MEMBERS:
        raise PeopleError(f"The project has {MOST_MEMBERS} members, which is the maximum.")
    return Membership.objects.create(project=project, user=user, role=role)


@transaction.atomic
def change_role(membership: Membership, role: Role) -> None:
    """Change the role of a member.

    Raises:
        PeopleError: it would leave the project without an administrator.
    """
    _lock(membership.project)
    if role != Role.ADMIN:
        _keep_an_admin(membership)
    Membership.objects.filter(pk=membership.pk).update(role=role)


@transaction.atomic
def remove_member(membership: Membership) -> None:
    """Remove a member. What they made stays.

    Raises:
        PeopleError: it would leave the project without an administrator.
    """
    _lock(membership.project)
    _keep_an_admin(membership)
    Membership.objects.filter(pk=membership.pk).delete()


def _lock(project: Project) -> None:
    """One change at a time: of two administrators who remove each other, one stays."""
    Project.objects.select_for_update().get(pk=project.pk)


def _keep_an_admin(membership: Membership) -> None:
    admins = Membership.objects.filter(project=membership.project_id, role=Role.ADMIN)
    if not admins.exclude(pk=membership.pk).exists() and admins.filter(pk=membership.pk).exists():
        raise PeopleError(LAST_ADMIN.format(name=membership.user.username))
