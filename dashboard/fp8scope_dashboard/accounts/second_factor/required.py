"""Demand a second factor of administrators, or of everybody: FP8SCOPE_TWO_FACTORS."""

from __future__ import annotations

from typing import Final

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.deprecation import MiddlewareMixin

from fp8scope_dashboard.accounts.models import Membership, Role, User
from fp8scope_dashboard.accounts.second_factor.sign_in import FACTORS

# Where a person without a second factor can go: to set one up, or to leave.
OPEN: Final = ("factor", "factor_confirm", "signout", "signin", "signin_code", "oidc_start", "oidc_callback")
FREE_PREFIXES: Final = ("/api/", "/mlflow/", "/otlp/", "/static/", "/shared/", "/alert-pictures/", "/signin/")


def must_have_two_factors(user: User) -> bool:
    """Return whether the server demands two factors of a user."""
    if settings.TWO_FACTORS == "everybody":
        return True
    if settings.TWO_FACTORS != "administrators":
        return False
    return user.is_superuser or Membership.objects.filter(user=user, role=Role.ADMIN).exists()


class RequireSecondFactor(MiddlewareMixin):
    """Redirect to the page of the second factor whoever must have one and has signed in without it."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        if not settings.TWO_FACTORS or request.path.startswith(FREE_PREFIXES):
            return None
        user = request.user
        if not isinstance(user, User) or request.session.get(FACTORS) or not must_have_two_factors(user):
            return None
        if request.path in {reverse(name) for name in OPEN}:
            return None
        messages.warning(request, "This server demands two factors of you: set up an authenticator app.")
        return redirect("factor")
