"""Finish a sign-in: at once, or after the code of a second factor."""

from __future__ import annotations

import time
from typing import Final

from django.contrib.auth import login
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.second_factor.codes import authenticator_of

PENDING: Final = "sign_in_pending"
"""The entry of a session in which the first factor was right: who, when, and where to go."""
PENDING_SECONDS: Final = 300.0
BACKEND: Final = "django.contrib.auth.backends.ModelBackend"
FACTORS: Final = "two_factors"
"""The entry of a session whose sign-in had two factors, here or at the provider."""
LINK: Final = "by_link"


def sign_in(request: HttpRequest, user: User, target: str, *, by_link: bool = False) -> HttpResponse:
    """Sign a user in whose first factor was right, or ask for the second one.

    Args:
        target: the address of the next page; one of another site is replaced by the home page.
        by_link: the first factor was a one-time link.
    """
    if authenticator_of(user) is None:
        # A sign-in that was begun with a provider may have shortened the session.
        request.session.set_expiry(None)
        login(request, user, backend=BACKEND)
        return redirect(own_address(request, target))
    # A session of somebody else must not be mixed with it.
    request.session.flush()
    request.session.set_expiry(int(PENDING_SECONDS))
    request.session[PENDING] = {"user": user.pk, "at": time.time(), "next": target[:2000], LINK: by_link}
    return redirect("signin_code")


def pending_user(request: HttpRequest) -> tuple[User, dict[str, object]] | None:
    """The user who has shown the first factor within PENDING_SECONDS, and the entry of the session."""
    entry = request.session.get(PENDING)
    if not entry or not 0.0 <= time.time() - entry["at"] < PENDING_SECONDS:
        return None
    user = User.objects.filter(pk=entry["user"], is_active=True).first()
    return None if user is None else (user, entry)


def finish(request: HttpRequest, user: User) -> None:
    """Sign a user in who has shown both factors."""
    request.session.pop(PENDING, None)
    request.session.set_expiry(None)
    login(request, user, backend=BACKEND)
    request.session[FACTORS] = True


def own_address(request: HttpRequest, target: str) -> str:
    """The target if it is of this site, else the home page. It may come from anybody."""
    allowed = url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure())
    return target if allowed else "home"
