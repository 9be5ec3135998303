"""Who can sign in, changed from the server's command line: links, passwords and new people.

The person at the server's shell can read the database anyway, so no permission is asked for here.
"""

from __future__ import annotations

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Membership, Project, Role, SignInLink, User
from fp8scope_dashboard.accounts.services import ADMINISTRATOR

MOST_NAMES = 10


class PeopleError(Exception):
    """The request cannot be met; the message says what to do."""


def person_named(name: str | None) -> User:
    """The active person of this name; without a name, the administrator of the installation.

    Raises:
        PeopleError: there is no such person, or they are deactivated.
    """
    user = _administrator() if name is None else User.objects.filter(username=name).first()
    if user is None:
        raise PeopleError(
            f"there is no person {name!r}{_known_names()}. `fp8scope admin invite NAME` makes one"
        )
    if not user.is_active:
        raise PeopleError(f"{user.username!r} is deactivated and cannot sign in. Name another with --user")
    return user


@transaction.atomic
def set_password(user: User, password: str) -> None:
    """Set a password. It ends the person's sessions, and links that were made before stop working.

    Raises:
        PeopleError: Django's validators refuse it; the message has their reasons.
    """
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise PeopleError(" ".join(error.messages)) from error
    user.set_password(password)
    user.save(update_fields=["password"])
    withdraw_links(user)


def withdraw_links(user: User) -> None:
    """Make the person's unused sign-in links useless: with a new password, nothing older lets anyone in."""
    now = timezone.now()
    SignInLink.objects.filter(user=user, used_at=None, expires_at__gt=now).update(expires_at=now)


@transaction.atomic
def invite(name: str, email: str, project: Project | None, role: Role) -> User:
    """Make a person without a password, and a member of `project` if one is given.

    Raises:
        PeopleError: the name is taken or is not one, or the e-mail address is not one.
    """
    if User.objects.filter(username__iexact=name).exists():
        raise PeopleError(
            f"there is a person {name!r} already. `fp8scope admin link --user {name}` makes a link for them"
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
    """The project with this slug.

    Raises:
        PeopleError: there is none; the message names those that exist.
    """
    project = Project.objects.filter(slug=slug).first()
    if project is None:
        slugs = ", ".join(Project.objects.values_list("slug", flat=True)[:MOST_NAMES])
        raise PeopleError(f"there is no project {slug!r}; the projects are: {slugs or 'none yet'}")
    return project


def _administrator() -> User:
    """The administrator who was made first and can still sign in; made here if there is none at all."""
    administrators = User.objects.filter(is_superuser=True)
    user = administrators.order_by("-is_active", "pk").first()
    if user is not None:
        return user
    if User.objects.filter(username__iexact=ADMINISTRATOR).exists():
        raise PeopleError(
            f"{ADMINISTRATOR!r} is not an administrator, and nobody else is. Name a person with --user"
        )
    return User.objects.create_superuser(ADMINISTRATOR)


def _known_names() -> str:
    names = ", ".join(User.objects.order_by("pk").values_list("username", flat=True)[:MOST_NAMES])
    return f" (there are: {names})" if names else ""
