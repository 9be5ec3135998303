"""Projects, the secrets of tokens, sign-in links and roles."""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import datetime, timedelta

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404
from django.utils import timezone

from fp8scope_dashboard.accounts.models import (
    ApiToken,
    Membership,
    Project,
    Role,
    SignInLink,
    User,
)
from fp8scope_dashboard.accounts.signals import project_created
from fp8scope_dashboard.db import replica, sql

ADMINISTRATOR = "admin"
DEFAULT_PROJECT = "default"
LINK_LIFETIME = timedelta(hours=24)
# `last_used_at` shows which tokens are unused; it need not be written with every request.
LAST_USED_RESOLUTION = timedelta(minutes=1)

TOKEN_FORM = re.compile(r"fp8s_[A-Za-z0-9]{8}_[A-Za-z0-9_-]{43}")
TOKEN_WORKS = """
    (token.digest = %(digest)s OR (token.former_digest = %(digest)s AND token.former_until > now()))
    AND token.revoked_at IS NULL AND (token.expires_at IS NULL OR token.expires_at > now())
    AND creator.is_active IS NOT FALSE
"""
"""The condition of a token's secret that works; `creator` is the user who created it, if any."""
# Raw SQL, because every API request runs it and the ORM takes longer to build it than PostgreSQL to run it.
_TOKEN_FIELDS = [field.attname for field in ApiToken._meta.concrete_fields]
_PROJECT_FIELDS = [field.attname for field in Project._meta.concrete_fields]
_TOKEN_OF_DIGEST = f"""
    SELECT {", ".join(f"token.{name}" for name in _TOKEN_FIELDS)},
        {", ".join(f"project.{name}" for name in _PROJECT_FIELDS)}
    FROM {ApiToken._meta.db_table} token
    JOIN {Project._meta.db_table} project ON project.id = token.project_id
    LEFT JOIN {User._meta.db_table} creator ON creator.id = token.created_by_id
    WHERE {TOKEN_WORKS}
"""
_RANKS = {Role.VIEWER.value: 0, Role.MEMBER.value: 1, Role.ADMIN.value: 2}


@transaction.atomic
def create_project(slug: str, name: str, owner: User | None = None, *, description: str = "") -> Project:
    """Create a project with the default alert rules. The owner becomes its administrator.

    Raises:
        ValidationError: the slug is taken or invalid, or the name is empty or too long.
    """
    project = Project(slug=slug, name=name, description=description)
    project.full_clean()
    project.save()
    if owner is not None:
        Membership.objects.create(user=owner, project=project, role=Role.ADMIN)
    project_created.send(sender=Project, project=project)
    return project


def authenticate_token(secret: str) -> ApiToken | None:
    """Return the token of a secret, with its project; None if it is unknown, revoked or expired.

    Tokens of a deactivated account do not work. `tokens.why_refused` says why a secret does not.
    """
    if not TOKEN_FORM.fullmatch(secret):
        return None
    rows = sql.fetch(_TOKEN_OF_DIGEST, {"digest": digest_of(secret)}, replica.PRIMARY)
    if not rows:
        return None
    row = rows[0]
    token = ApiToken.from_db(replica.PRIMARY, _TOKEN_FIELDS, row[: len(_TOKEN_FIELDS)])
    token.project = Project.from_db(replica.PRIMARY, _PROJECT_FIELDS, row[len(_TOKEN_FIELDS) :])
    note_use(token.pk, token.last_used_at)
    return token


def administers(token: ApiToken) -> bool:
    """Return whether the owner of a token administers its project now. True without an owner."""
    owner = token.created_by
    return owner is None or role_in(owner, token.project) == Role.ADMIN


def note_use(token_id: int, last_used_at: datetime | None) -> None:
    """Record that a token is used, unless that was recorded within LAST_USED_RESOLUTION."""
    now = timezone.now()
    if last_used_at is None or now - last_used_at > LAST_USED_RESOLUTION:
        ApiToken.objects.filter(pk=token_id).update(last_used_at=now)


def is_token(secret: str) -> bool:
    """Return whether a secret is a valid token. Unlike `authenticate_token`, writes nothing."""
    return token_and_project(secret) is not None


def token_and_project(secret: str) -> tuple[int, int] | None:
    """The ids of a valid token and its project; None if it is not valid. Writes nothing."""
    rows = sql.fetch(_TOKEN_OF_DIGEST, {"digest": digest_of(secret)}, replica.PRIMARY)
    if not rows:
        return None
    fields = dict(zip(_TOKEN_FIELDS, rows[0], strict=False))
    return fields["id"], fields["project_id"]


def create_sign_in_link(user: User, base_url: str, lifetime: timedelta = LINK_LIFETIME) -> str:
    """Return a link that signs the user in, once, within its lifetime. Only its hash is stored."""
    secret = secrets.token_urlsafe(32)
    SignInLink.objects.create(user=user, digest=digest_of(secret), expires_at=timezone.now() + lifetime)
    return f"{base_url.rstrip('/')}/signin/{secret}/"


def use_sign_in_link(secret: str) -> User | None:
    """Use up a sign-in link. Returns its user; None if the link is unknown, expired or used."""
    now = timezone.now()
    links = _usable_links(secret)
    # The update is atomic: of two concurrent requests only one succeeds.
    if not links.update(used_at=now):
        return None
    return SignInLink.objects.select_related("user").get(digest=digest_of(secret)).user


def is_usable_link(secret: str) -> bool:
    """Return whether `use_sign_in_link` would succeed."""
    return _usable_links(secret).exists()


@transaction.atomic
def create_administrator_link(base_url: str) -> str | None:
    """Return a sign-in link for the first administrator of a new installation.

    Creates the administrator and a default project if missing. Returns None once any administrator has signed
    in.
    """
    if User.objects.filter(is_superuser=True, last_login__isnull=False).exists():
        return None
    user = User.objects.filter(is_superuser=True).order_by("pk").first()
    if user is None:
        user = User(username=ADMINISTRATOR, is_staff=True, is_superuser=True)
        user.set_unusable_password()
        user.save()
    if not Project.objects.exists():
        create_project(DEFAULT_PROJECT, "Default", owner=user)
    return create_sign_in_link(user, base_url)


def projects_of(user: User) -> QuerySet[Project]:
    """The projects that a user may see: their memberships, or all for an administrator."""
    if user.is_superuser:
        return Project.objects.all()
    return Project.objects.filter(memberships__user=user)


def role_in(user: User, project: Project) -> Role | None:
    """The role of a user in a project; None without one. Superusers are administrators of all projects."""
    if not user.is_active:
        return None
    if user.is_superuser:
        return Role.ADMIN
    role = Membership.objects.filter(user=user, project=project).values_list("role", flat=True).first()
    return Role(role) if role else None


def require_project(user: User, slug: str, role: Role = Role.VIEWER) -> Project:
    """Return the project if the user has at least this role in it.

    Raises:
        Http404: the project does not exist, or the user is not a member; the two look the same.
        PermissionDenied: the user is a member with a lower role.
    """
    project = projects_of(user).filter(slug=slug).first()
    held = role_in(user, project) if project is not None else None
    if project is None or held is None:
        raise Http404("No such project.")
    if _RANKS[held.value] < _RANKS[role.value]:
        raise PermissionDenied(
            f"This requires the role {role.value} in {project.name}; yours is {held.value}. An "
            "administrator of the project can change it."
        )
    return project


def digest_of(secret: str) -> bytes:
    """The hash under which a secret is stored."""
    return hashlib.sha256(secret.encode()).digest()


def _usable_links(secret: str) -> QuerySet[SignInLink]:
    return SignInLink.objects.filter(
        digest=digest_of(secret), used_at=None, expires_at__gt=timezone.now(), user__is_active=True
    )
