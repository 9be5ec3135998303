"""The users of a provider's accounts, and the roles that its groups give them."""

from __future__ import annotations

import re
from typing import Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.accounts import members
from fp8scope_dashboard.accounts.models import Membership, OidcIdentity, Project, Role, User
from fp8scope_dashboard.accounts.oidc.client import Claims, OidcError
from fp8scope_dashboard.accounts.permissions import ORDER
from fp8scope_dashboard.accounts.signals import roles_synchronised
from fp8scope_dashboard.settings.sign_in import GroupRoles, OidcSettings

RoleChanges = dict[int | None, tuple[str | None, str | None]]
"""The old and the new role by the id of a project, None without a role; of the key None in the server."""
NO_ACCESS: Final = "None of your groups has access to this server. Ask who administers it."


@transaction.atomic
def user_of(claims: Claims, provider: OidcSettings, signed_in: User | None = None) -> User:
    """The user of a provider's account, with the roles of its groups. The first sign-in makes the user.

    Args:
        signed_in: the user of the session. An account that is new here becomes theirs.

    Raises:
        OidcError: the user may not sign in; the message says why, and nothing is changed.
    """
    identity = (
        OidcIdentity.objects.select_related("user")
        .filter(issuer=provider.issuer, subject=claims.subject)
        .first()
    )
    if identity is not None:
        if signed_in is not None and signed_in.pk != identity.user_id:
            raise OidcError("This account belongs to another user of this server.")
        user = identity.user
    elif signed_in is not None:
        user = signed_in
    else:
        user = _new_user(claims, provider)
    if not user.is_active:
        raise OidcError("Your account here is deactivated.")
    OidcIdentity.objects.update_or_create(
        issuer=provider.issuer,
        subject=claims.subject,
        defaults={"user": user, "signed_in_at": timezone.now()},
    )
    if provider.roles is not None:
        synchronise(user, claims.groups or frozenset(), provider.roles)
    return user


def may_enter(user: User, provider: OidcSettings) -> bool:
    """Return whether a user has anything here. Without a file of roles, administrators add people later."""
    user.refresh_from_db()
    return provider.roles is None or user.is_superuser or user.memberships.exists()


def synchronise(user: User, groups: frozenset[str], roles: GroupRoles) -> None:
    """Give a user the roles of their groups, and take those that no group gives, in the projects of `roles`.

    A removed member's tokens and links end. Projects that `roles` does not name stay as they are.
    """
    changes: RoleChanges = {}
    for project in Project.objects.filter(slug__in=list(roles.projects)):
        wanted = _role_of(groups, roles, project.slug)
        membership = (
            Membership.objects.filter(user=user, project=project).select_related("project", "user").first()
        )
        held = None if membership is None else Role(membership.role)
        if held == wanted:
            continue
        if membership is None:
            assert wanted is not None
            Membership.objects.create(user=user, project=project, role=wanted)
        elif wanted is None:
            members.remove_member(membership, may_be_last=True)
        else:
            members.change_role(membership, wanted, may_be_last=True)
        changes[project.pk] = (held and held.value, wanted and wanted.value)
    if roles.administrators is not None:
        is_administrator = bool(groups & roles.administrators)
        if user.is_superuser != is_administrator:
            user.is_superuser = user.is_staff = is_administrator
            user.save(update_fields=["is_superuser", "is_staff"])
            of_server = Role.ADMIN.value
            changes[None] = (None, of_server) if is_administrator else (of_server, None)
    if changes:
        roles_synchronised.send(sender=OidcIdentity, user=user, changes=changes)


def _role_of(groups: frozenset[str], roles: GroupRoles, slug: str) -> Role | None:
    """The highest role that one of the groups gives in a project."""
    given = roles.projects[slug]
    return next((role for role in reversed(ORDER) if groups & given.get(role.value, frozenset())), None)


def _new_user(claims: Claims, provider: OidcSettings) -> User:
    """A new user with the name that the provider gives.

    A user of that name who exists is never taken for the same person: whoever chooses their name at the
    provider could become anybody. They connect the account themselves, on the account page.
    """
    if provider.roles is not None and not _gives_anything(claims.groups or frozenset(), provider.roles):
        raise OidcError(NO_ACCESS)
    name = re.sub(r"[^\w.@+-]", "-", claims.username)[:150]
    if not name:
        raise OidcError(f"The provider sent no user name (the claim {provider.username_claim}).")
    if User.objects.filter(username__iexact=name).exists():
        raise OidcError(
            f"There is a user “{name}” already. If it is you, sign in as before and connect single sign-on "
            "on the account page; otherwise ask who administers this server."
        )
    user = User(username=name, email=claims.email)
    user.set_unusable_password()
    try:
        user.full_clean(exclude=["password"])
    except ValidationError:
        user.email = ""
        try:
            user.full_clean(exclude=["password"])
        except ValidationError:
            raise OidcError("The user name that the provider sent cannot be used here.") from None
    user.save()
    return user


def _gives_anything(groups: frozenset[str], roles: GroupRoles) -> bool:
    existing = Project.objects.filter(slug__in=list(roles.projects)).values_list("slug", flat=True)
    return bool(groups & (roles.administrators or frozenset())) or any(
        _role_of(groups, roles, slug) is not None for slug in existing
    )
