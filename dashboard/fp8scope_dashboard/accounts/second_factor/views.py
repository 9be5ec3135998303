"""The pages of the second factor: its code at sign-in, and setting it up, renewing and removing it."""

from __future__ import annotations

from typing import Any, Final

import segno
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from fp8scope_dashboard.accounts import account_page
from fp8scope_dashboard.accounts.addresses import address_group
from fp8scope_dashboard.accounts.attempts import attempts
from fp8scope_dashboard.accounts.models import Authenticator, User
from fp8scope_dashboard.accounts.second_factor import codes
from fp8scope_dashboard.accounts.second_factor.required import must_have_two_factors
from fp8scope_dashboard.accounts.second_factor.sign_in import FACTORS, LINK, finish, own_address, pending_user
from fp8scope_dashboard.accounts.signals import code_refused, factor_changed

WRONG: Final = (
    "This code is wrong or was used already. Wait for the next one, and check the clock of your phone."
)


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def signin_code(request: HttpRequest) -> HttpResponse:
    """Ask for the code of the second factor, after the first one was right. Attempts are limited."""
    pending = pending_user(request)
    if pending is None:
        return redirect("signin")
    user, entry = pending
    if request.method != "POST":
        return _code_page(request)
    wait = _admit(request, user)
    if wait:
        return _code_page(request, status=429, wait=wait)
    if not codes.use_code(user, request.POST.get("code", "")):
        code_refused.send(sender=User, user=user, request=request)
        return _code_page(request, status=422, problem=WRONG)
    attempts.succeeded(_key(user), address_group(request.META.get("REMOTE_ADDR")))
    finish(request, user)
    left = codes.recovery_codes_left(user)
    if left <= 2:
        messages.warning(request, f"You have {left} recovery codes left: make new ones on the account page.")
    if entry.get(LINK):
        account_page.recommend_password(request, user)
    return redirect(own_address(request, str(entry.get("next", ""))))


def _admit(request: HttpRequest, user: User) -> int:
    """Count an attempt as one with a password is. Returns the seconds to wait, 0 if it may be checked."""
    return attempts.admit(_key(user), address_group(request.META.get("REMOTE_ADDR")))


def _key(user: User) -> str:
    # A right password must not reset the attempts with codes.
    return f"code\n{user.username}"


def _code_page(request: HttpRequest, status: int = 200, **context: Any) -> HttpResponse:
    answer = render(request, "accounts/signin_code.html", context, status=status)
    if "wait" in context:
        answer["Retry-After"] = str(context["wait"])
    return answer


@never_cache
@login_required
@sensitive_variables("secret")
@require_http_methods(["GET", "HEAD", "POST"])
def factor(request: HttpRequest) -> HttpResponse:
    """The page of the second factor; POST begins setting one up, with a new secret."""
    user = _user(request)
    stored = Authenticator.objects.filter(user=user).first()
    if request.method == "POST" and (stored is None or stored.confirmed_at is None):
        stored = codes.begin(user)
    if stored is None or stored.confirmed_at is not None or request.method != "POST":
        return _page(request, user)
    return _setup_page(request, user, stored)


@never_cache
@login_required
@sensitive_post_parameters()
@require_POST
def factor_confirm(request: HttpRequest) -> HttpResponse:
    """Confirm the authenticator with a first code. Only this response shows the recovery codes."""
    user = _user(request)
    stored = Authenticator.objects.filter(user=user, confirmed_at=None).first()
    if stored is None:
        return redirect("factor")
    wait = _admit(request, user)
    recovery = None if wait else codes.confirm(stored, request.POST.get("code", ""))
    if recovery is None:
        problem = f"Too many attempts. Try again in {wait} seconds." if wait else WRONG
        return _setup_page(request, user, stored, problem=problem, status=429 if wait else 422)
    request.session[FACTORS] = True
    factor_changed.send(sender=User, user=user, text="set up an authenticator app", request=request)
    messages.success(request, "Your second factor is set up. From now on, sign-ins ask for a code.")
    return _page(request, user, recovery=recovery)


@never_cache
@login_required
@sensitive_post_parameters()
@require_POST
def factor_change(request: HttpRequest, change: str) -> HttpResponse:
    """Make new recovery codes, or remove the second factor. Both need a code, and not only a session."""
    user = _user(request)
    if wait := _admit(request, user):
        return _page(request, user, status=429, problem=f"Too many attempts. Try again in {wait} seconds.")
    if change == "remove" and must_have_two_factors(user):
        return _page(request, user, status=422, problem="This server demands two factors of you.")
    if not codes.use_code(user, request.POST.get("code", "")):
        code_refused.send(sender=User, user=user, request=request)
        return _page(request, user, status=422, problem=WRONG)
    attempts.succeeded(_key(user), address_group(request.META.get("REMOTE_ADDR")))
    if change == "recovery":
        recovery = codes.renew_recovery_codes(user)
        factor_changed.send(sender=User, user=user, text="made new recovery codes", request=request)
        return _page(request, user, recovery=recovery)
    codes.remove(user)
    request.session.pop(FACTORS, None)
    factor_changed.send(sender=User, user=user, text="removed the authenticator app", request=request)
    messages.success(request, "Your second factor is removed.")
    return redirect("factor")


def _setup_page(
    request: HttpRequest, user: User, stored: Authenticator, *, problem: str = "", status: int = 200
) -> HttpResponse:
    secret = codes.secret_of(stored)
    picture = segno.make(codes.address_of(stored), error="m").svg_data_uri(scale=5, border=3, light="white")
    spaced = " ".join(secret[start : start + 4] for start in range(0, len(secret), 4))
    return _page(request, user, picture=picture, secret=spaced, problem=problem, status=status)


def _page(request: HttpRequest, user: User, *, status: int = 200, **context: Any) -> HttpResponse:
    confirmed = codes.authenticator_of(user)
    shown = {
        "section": "account",
        "authenticator": confirmed,
        "codes_left": codes.recovery_codes_left(user),
        "is_demanded": must_have_two_factors(user),
        **context,
    }
    return render(request, "accounts/factor.html", shown, status=status)


def _user(request: HttpRequest) -> User:
    user = request.user
    assert isinstance(user, User)
    return user
