"""The life of API tokens: create, rotate and revoke them, and say why a secret does not work."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Final

from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project, Scope, User
from fp8scope_dashboard.accounts.services import TOKEN_FORM, digest_of

MAX_TOKENS: Final = 200
"""Tokens of a project that work. Those that do not work any more are not counted."""
LIFETIMES: Final[Mapping[str, timedelta | None]] = {
    "30 days": timedelta(days=30),
    "90 days": timedelta(days=90),
    "365 days": timedelta(days=365),
    "never": None,
}
"""The choices of the page, by their words."""
MAX_LIFETIME: Final = timedelta(days=3_650)
OVERLAP: Final = timedelta(hours=24)
"""The former secret of a rotated token works for this long."""
UNEXPIRED: Final = Q(expires_at=None) | Q(expires_at__gt=Now())
LABEL_LENGTH: Final = 8
_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class TokenError(ValueError):
    """The token cannot be made or rotated; the message says what to do."""


@transaction.atomic
def create_token(
    project: Project,
    name: str,
    user: User | None = None,
    scopes: Collection[str] = (Scope.WRITE,),
    lifetime: timedelta | None = None,
) -> tuple[ApiToken, str]:
    """Create a token of a project. Returns it with its secret, of which only the hash is stored.

    Args:
        user: its owner.
        lifetime: None: it does not expire.

    Raises:
        TokenError: the project has MAX_TOKENS, or the lifetime is out of bounds.
        ValidationError: the name is empty or too long, or there is no scope.
    """
    # One at a time, so that the bound holds.
    Project.objects.select_for_update().get(pk=project.pk)
    if working_tokens(project).count() >= MAX_TOKENS:
        raise TokenError(
            f"The project has {MAX_TOKENS} tokens, which is the maximum. Revoke those that nobody uses."
        )
    if lifetime is not None and not timedelta(0) < lifetime <= MAX_LIFETIME:
        raise TokenError(f"A token works for at most {MAX_LIFETIME.days:,} days, or without an end.")
    prefix = "fp8s_" + "".join(secrets.choice(_ALPHABET) for _ in range(LABEL_LENGTH))
    secret = _secret(prefix)
    now = timezone.now()
    token = ApiToken(
        project=project,
        name=name,
        prefix=prefix,
        digest=digest_of(secret),
        scopes=[scope.value for scope in Scope if scope in scopes],
        created_by=user,
        created_at=now,
        expires_at=None if lifetime is None else now + lifetime,
    )
    token.full_clean(exclude=["created_by"])
    token.save()
    return token, secret


@transaction.atomic
def rotate_token(token: ApiToken) -> str:
    """Give a token a new secret, and return it. The former one works for OVERLAP beside it.

    The token begins its lifetime again. A secret from before an earlier rotation ends at once.

    Raises:
        TokenError: the token is revoked or expired.
    """
    stored = ApiToken.objects.select_for_update(of=("self",)).get(pk=token.pk)
    if not stored.works:
        raise TokenError("Only a token that works can get a new secret. Create another token.")
    now, secret = timezone.now(), _secret(stored.prefix)
    if stored.expires_at is not None:
        stored.expires_at = now + (stored.expires_at - (stored.rotated_at or stored.created_at))
    stored.former_digest, stored.former_until = stored.digest, now + OVERLAP
    stored.digest, stored.rotated_at = digest_of(secret), now
    stored.save(update_fields=["digest", "former_digest", "former_until", "rotated_at", "expires_at"])
    token.refresh_from_db()
    return secret


@transaction.atomic
def renew_token(token: ApiToken, user: User | None, lifetime: timedelta) -> str:
    """Let a token of the server's own, also a revoked one, work for somebody, and return its new secret.

    Its former secret ends at once. It stays the same token, so that what it registers stays its own.
    """
    secret, now = _secret(token.prefix), timezone.now()
    ApiToken.objects.filter(pk=token.pk).update(
        digest=digest_of(secret),
        former_digest=None,
        former_until=None,
        created_by=user,
        created_at=now,
        rotated_at=None,
        expires_at=now + lifetime,
        last_used_at=None,
        revoked_at=None,
    )
    return secret


def revoke_token(token: ApiToken) -> None:
    """Revoke a token, with both of its secrets, from the next request on. Idempotent."""
    ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now())


def working_tokens(project: Project) -> QuerySet[ApiToken]:
    """The tokens of a project that are neither revoked nor expired."""
    return ApiToken.objects.filter(UNEXPIRED, project=project, revoked_at=None)


def why_refused(secret: str) -> str:
    """A sentence on why a secret does not work. It says nothing to who does not have the secret."""
    unknown = "The token is unknown or was revoked."
    if not TOKEN_FORM.fullmatch(secret):
        return unknown
    digest = digest_of(secret)
    tokens = ApiToken.objects.select_related("created_by").filter(Q(digest=digest) | Q(former_digest=digest))
    token = tokens.first()
    if token is None:
        return unknown
    name = f"The token “{token.name}” ({token.prefix}…)"
    if token.revoked_at is not None:
        return f"{name} was revoked on {token.revoked_at:%Y-%m-%d %H:%M} UTC."
    if token.expires_at is not None and token.is_expired:
        return f"{name} expired on {token.expires_at:%Y-%m-%d %H:%M} UTC."
    if token.created_by is not None and not token.created_by.is_active:
        return f"{name} belongs to an account that is deactivated."
    if token.former_until is not None and bytes(token.digest) != digest:
        return f"{name} has a new secret; this one worked until {token.former_until:%Y-%m-%d %H:%M} UTC."
    return unknown


def _secret(prefix: str) -> str:
    """A new secret with 256 random bits. Its beginning, which is shown, stays that of its token."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"
