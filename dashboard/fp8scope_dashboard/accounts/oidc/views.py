"""The addresses of a sign-in with OpenID Connect: to the provider, and back from it."""

from __future__ import annotations

from typing import Final

from django.contrib import messages
from django.contrib.auth import login
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.oidc.client import OidcError, begin, finish, provider_or_none
from fp8scope_dashboard.accounts.oidc.identities import NO_ACCESS, may_enter, user_of
from fp8scope_dashboard.accounts.second_factor.sign_in import BACKEND, FACTORS, own_address

NEXT: Final = "oidc_next"
ANONYMOUS_SECONDS: Final = 900
"""The life of a session that only holds the state of a sign-in with the provider."""


@never_cache
@require_safe
def oidc_start(request: HttpRequest) -> HttpResponse:
    """Redirect to the provider. For a user who is signed in, its account is connected with theirs.

    A link and no form: the content security policy lets no form lead to another site.
    """
    if provider_or_none() is None:
        raise Http404("This server has no single sign-on.")
    if not request.user.is_authenticated:
        request.session.set_expiry(ANONYMOUS_SECONDS)
    request.session[NEXT] = request.GET.get("next", "")[:2000]
    try:
        return begin(request, server_address(request) + reverse("oidc_callback"))
    except OidcError as error:
        return _refused(request, str(error), 503)


@never_cache
@require_safe
def oidc_callback(request: HttpRequest) -> HttpResponse:
    """Sign in the user whom the provider names, if its answer belongs to this session."""
    provider = provider_or_none()
    if provider is None:
        raise Http404("This server has no single sign-on.")
    target = str(request.session.pop(NEXT, ""))
    signed_in = request.user if isinstance(request.user, User) else None
    try:
        user = user_of(finish(request), provider, signed_in)
    except OidcError as error:
        return _refused(request, str(error), 403)
    if not may_enter(user, provider):
        return _refused(request, NO_ACCESS, 403)
    login(request, user, backend=BACKEND)
    # The provider asks for the factors that the company demands.
    request.session[FACTORS] = True
    request.session.set_expiry(int(3600 * provider.session_hours))
    if signed_in is not None:
        messages.success(request, f"Connected: you can sign in with {provider.name}.")
        return redirect("account")
    return redirect(own_address(request, target))


def _refused(request: HttpRequest, reason: str, status: int) -> HttpResponse:
    return render(request, "accounts/oidc_refused.html", {"reason": reason}, status=status)
