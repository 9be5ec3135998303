"""Manage users from the command line of the server: links, passwords, new users.

Checks no permissions: a user with a shell on the server can read the database anyway.
"""

from __future__ import annotations

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Membership, Project, Role, SignInLink, User
from fp8scope_dashboard.accounts.services import ADMINISTRATOR

MAX_NAMES = 10


class PeopleError(Exception):
    """The request is invalid; the message says what to do."""


def person_named(name: str | None) -> User:
    """Return the active user with this name, or the administrator if `name` is None.

    Raises:
        PeopleError: the user does not exist or is deactivated.
    """
    user = _administrator() if name is None else User.objects.filter(username=name).first()
    if user is None:
        raise PeopleError(
            f"there is no user {name!r}{_known_names()}. `fp8scope admin invite NAME` creates one"
        )
    if not user.is_active:
        raise PeopleError(
            f"{user.username!r} is deactivated and cannot sign in. Choose another user with --user"
        )
    return user


@transaction.atomic
def set_password(user: User, password: str) -> None:
    """Set the password of a user. Ends all sessions and revokes unused sign-in links.

    Raises:
        PeopleError: a password validator of Django rejects it; the message has the reasons.
    """
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise PeopleError(" ".join(error.messages)) from error
    user.set_password(password)
    user.save(update_fields=["password"])
    withdraw_links(user)


def withdraw_links(user: User) -> None:
    """Revoke the unused sign-in links of a user, for instance after a password change."""
    now = timezone.now()
    SignInLink.objects.filter(user=user, used_at=None, expires_at__gt=now).update(expires_at=now)


@transaction.atomic
def invite(name: str, email: str, project: Project | None, role: Role) -> User:
    """Create a user without a password, as a member of `project` if given.

    Raises:
        PeopleError: the name is taken, or the name or the e-mail address is invalid.
    """
    if User.objects.filter(username__iexact=name).exists():
        raise PeopleError(
            f"user {name!r} already exists. `fp8scope admin link --user {name}` makes a sign-in link"
        )
    user = User(username=name, email=email)
    user.set_unusable_password()
    try:
        user.full_clean(exclude=["password"])
    except ValidationError as error:
        reasons = (f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items())
        raise PeopleError(" ".join(reasons)) from error
    user.save()
    if project is not None:
        Membership.objects.create(user=user, project=project, role=role)
    return user


def project_named(slug: str) -> Project:
    """Return the project with this slug.

    Raises:
        PeopleError: there is none; the message lists the existing projects.
    """
    project = Project.objects.filter(slug=slug).first()
    if project is None:
        slugs = ", ".join(Project.objects.values_list("slug", flat=True)[:MAX_NAMES])
        raise PeopleError(f"there is no project {slug!r}; the projects are: {slugs or 'none yet'}")
    return project


def _administrator() -> User:
    """Return the oldest active administrator, creating one if there is none."""
    administrators = User.objects.filter(is_superuser=True)
    user = administrators.order_by("-is_active", "pk").first()
    if user is not None:
        return user
    if User.objects.filter(username__iexact=ADMINISTRATOR).exists():
        raise PeopleError(
            f"{ADMINISTRATOR!r} is not an administrator, and nobody else is. Choose a user with --user"
        )
    return User.objects.create_superuser(ADMINISTRATOR)


def _known_names() -> str:
    names = ", ".join(User.objects.order_by("pk").values_list("username", flat=True)[:MAX_NAMES])
    return f" (users: {names})" if names else ""
