"""The API tokens of a project on its settings page: list, create, rotate and revoke them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Case, F, Q, Value, When
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import ApiToken, Project, Scope
from fp8scope_dashboard.accounts.permissions import Permission
from fp8scope_dashboard.accounts.tokens import (
    LIFETIMES,
    MAX_TOKENS,
    TokenError,
    create_token,
    revoke_token,
    rotate_token,
)
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.pages.access import POST, in_project, may, page, person, require_own, rights_of

DEFAULT_LIFETIME: Final = "365 days"
SOON: Final = timedelta(days=14)
"""A token that expires within this time is marked."""
SCOPES: Final[tuple[tuple[Scope, str, str], ...]] = (
    (
        Scope.WRITE,
        "Write runs",
        "For training processes. Registers runs and sends their data; reads only runs that it registered.",
    ),
    (Scope.READ, "Read", "Reads and exports every run of the project, and exports its alert rules."),
    (
        Scope.ADMINISTER,
        "Administer",
        "Changes and removes alert rules, which can command trainings, and deletes runs. Includes Read. "
        "Works while its owner is an administrator.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ShownToken:
    """A row of the table of tokens. `state` is empty for a token that works and does not expire soon."""

    token: ApiToken
    state: str
    expires_soon: bool
    may_revoke: bool
    may_rotate: bool


def tokens_context(request: HttpRequest, project: Project) -> dict[str, Any]:
    """The context of the table of tokens and of the form of a new one."""
    rights = rights_of(request, project)
    may_administer = may(request, project, permissions.ADMINISTER_TOKENS)
    return {
        "tokens": [_shown(token, rights) for token in _listed(project)],
        "scopes": [choice for choice in SCOPES if may_administer or choice[0] != Scope.ADMINISTER],
        "lifetimes": [(words, words == DEFAULT_LIFETIME) for words in LIFETIMES],
    }


def _listed(project: Project) -> list[ApiToken]:
    """The tokens that work, the newest first, then those that do not."""
    ended = Q(revoked_at__isnull=False) | Q(expires_at__lte=timezone.now())
    tokens = ApiToken.objects.filter(project=project).select_related("created_by")
    tokens = tokens.annotate(has_ended=Case(When(ended, then=Value(1)), default=Value(0)))
    return list(
        tokens.order_by("has_ended", F("revoked_at").desc(nulls_first=True), "-created_at")[:MAX_TOKENS]
    )


def _shown(token: ApiToken, rights: Callable[[Permission, int | None], bool]) -> ShownToken:
    state = "Revoked" if token.revoked_at is not None else "Expired" if token.is_expired else ""
    return ShownToken(
        token=token,
        state=state,
        expires_soon=not state and token.expires_at is not None and token.expires_at < timezone.now() + SOON,
        may_revoke=token.works and rights(permissions.REVOKE_TOKENS, token.created_by_id),
        may_rotate=token.works and rights(permissions.ROTATE_TOKENS, token.created_by_id),
    )


@in_project()
def token_list(request: HttpRequest, project: Project) -> HttpResponse:
    """The table of tokens, for a refresh."""
    context = tokens_context(request, project)
    return page(request, project, "settings", "pages/project/_tokens.html", context)


def create(request: HttpRequest, project: Project) -> dict[str, Any]:
    """Create the token of a form. Returns the context that shows its secret, or the problem.

    Raises:
        PermissionDenied: it would administer, and the user is no administrator.
    """
    context: dict[str, Any] = {"server_url": server_address(request)}
    name = request.POST.get("name", "").strip() or f"{person(request).username}'s token"
    # A form without scopes or a lifetime, as programs wrote them for version 0.1, asks for its defaults.
    scopes = request.POST.getlist("scopes") if "has_scopes" in request.POST else [Scope.WRITE.value]
    lifetime = request.POST.get("lifetime", "never")
    if not set(scopes) & set(Scope.values):
        return {**context, "problem": "Choose what the token may do."}
    if lifetime not in LIFETIMES:
        return {**context, "problem": f"Choose how long the token works: {', '.join(LIFETIMES)}."}
    if Scope.ADMINISTER in scopes and not may(request, project, permissions.ADMINISTER_TOKENS):
        raise PermissionDenied("Only administrators of the project create tokens that administer.")
    try:
        token, secret = create_token(project, name, person(request), scopes, LIFETIMES[lifetime])
    except ValidationError as error:
        return {**context, "problem": " ".join(error.messages)}
    except TokenError as error:
        return {**context, "problem": str(error)}
    text = f"{_named(token)}: {token.scope_labels}; expires: {_end(token)}"
    record(actor_of(request), project, Action.TOKEN_CREATED, text)
    return {**context, "token": token, "secret": secret}


def secret_part(request: HttpRequest, project: Project, context: dict[str, Any]) -> HttpResponse:
    """The part of the page that shows a secret once, or why there is none."""
    answer = render(request, "pages/project/_token.html", {"project": project, **context})
    # This event makes the table of tokens reload itself.
    answer["HX-Trigger"] = "fp8:tokens"
    return answer


def rotate(request: HttpRequest, project: Project, token_id: int) -> dict[str, Any]:
    """Give a token a new secret. Returns the context that shows it, or the problem.

    Only its owner does, because a secret acts in their name; of a token without one, an administrator.

    Raises:
        PermissionDenied: the user does not own the token.
    """
    token = token_of(project, token_id)
    require_own(request, project, permissions.ROTATE_TOKENS, token.created_by_id)
    try:
        secret = rotate_token(token)
    except TokenError as error:
        return {"problem": str(error)}
    text = f"{_named(token)}; the former secret works until {token.former_until:%Y-%m-%d %H:%M} UTC"
    record(actor_of(request), project, Action.TOKEN_ROTATED, text)
    return {"token": token, "secret": secret, "is_rotated": True, "server_url": server_address(request)}


@in_project(permissions.REVOKE_TOKENS, methods=POST)
def token_revoke(request: HttpRequest, project: Project, token_id: int) -> HttpResponse:
    """Revoke a token."""
    token = token_of(project, token_id)
    require_own(request, project, permissions.REVOKE_TOKENS, token.created_by_id)
    revoke_token(token)
    record(actor_of(request), project, Action.TOKEN_REVOKED, _named(token))
    messages.success(request, f"Revoked the token “{token.name}”. The server refuses processes that use it.")
    return redirect(f"{reverse('settings', args=[project.slug])}#tokens")


def token_of(project: Project, token_id: int) -> ApiToken:
    """The token with this number.

    Raises:
        Http404: the project has none.
    """
    token = ApiToken.objects.filter(project=project, pk=token_id).first()
    if token is None:
        raise Http404("No such token.")
    return token


def _named(token: ApiToken) -> str:
    return f"“{token.name}” ({token.prefix}…)"


def _end(token: ApiToken) -> str:
    return "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d}"
