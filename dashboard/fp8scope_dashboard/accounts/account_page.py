"""The page on which users set and change their password."""

from __future__ import annotations

import time
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_required
from django.contrib.auth.forms import PasswordChangeForm, SetPasswordForm
from django.core.exceptions import ValidationError
from django.core.validators import MaxLengthValidator
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.html import format_html
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from fp8scope_dashboard.accounts import passwords, sessions, time_zones
from fp8scope_dashboard.accounts.models import OidcIdentity, User
from fp8scope_dashboard.accounts.people import withdraw_links
from fp8scope_dashboard.accounts.second_factor.codes import authenticator_of

LINK_AT = "signed_in_with_link_at"
# For this long after a sign-in by link, the old password is not asked for: links are for users who have lost
# it. Not for the whole session, which another person may find open.
LINK_SECONDS = 3600.0
MAX_PASSWORD_LENGTH = 4096
MAX_PROJECTS = 200


class _ChangeForm(PasswordChangeForm):
    """PasswordChangeForm that checks the old password in the hashing threads of accounts.passwords."""

    @sensitive_variables("old_password")
    def clean_old_password(self) -> str:
        old_password: str = self.cleaned_data["old_password"]
        if not passwords.verify(old_password, self.user.password)[0]:
            raise ValidationError(self.error_messages["password_incorrect"], code="password_incorrect")
        return old_password


@never_cache
@login_required
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def account(request: HttpRequest) -> HttpResponse:
    """Set or change the password. Ends all other sessions of the user."""
    user = request.user
    assert isinstance(user, User)
    if request.method == "POST" and not settings.PASSWORDS:
        messages.error(request, "This server has switched passwords off.")
        return redirect("account")
    needs_old = _needs_old_password(request, user)
    form_class: type[SetPasswordForm[User]] = _ChangeForm if needs_old else SetPasswordForm
    form = form_class(user, request.POST if request.method == "POST" else None)
    for field in form.fields.values():
        # The time to hash grows with the length.
        field.validators.append(MaxLengthValidator(MAX_PASSWORD_LENGTH))
    if request.method != "POST" or not form.is_valid():
        status = 422 if request.method == "POST" else 200
        context = {"form": form, "needs_old": needs_old, **_sections(request, user)}
        return render(request, "accounts/account.html", context, status=status)
    # Hash before the transaction, because it is slow.
    user.password = passwords.encode(form.cleaned_data["new_password1"])
    with transaction.atomic():
        user.save(update_fields=["password"])
        withdraw_links(user)
    request.session.pop(LINK_AT, None)
    update_session_auth_hash(request, user)
    messages.success(request, "Your password is set. All your other sessions are signed out.")
    return redirect("account")


def _sections(request: HttpRequest, user: User) -> dict[str, Any]:
    """The rest of the page."""
    return {
        "section": "account",
        "passwords": settings.PASSWORDS,
        "provider": settings.OIDC,
        "identities": OidcIdentity.objects.filter(user=user).count(),
        "has_factor": authenticator_of(user) is not None,
        "sessions": sessions.sessions_of(user, request.session.session_key),
        "zones": time_zones.zone_names(),
        "memberships": user.memberships.select_related("project").order_by("project__name")[:MAX_PROJECTS],
    }


@never_cache
@login_required
@require_POST
def account_time_zone(request: HttpRequest) -> HttpResponse:
    """Choose the time zone of the pages; empty means UTC."""
    user = request.user
    assert isinstance(user, User)
    name = request.POST.get("time_zone", "").strip()
    if name and name not in time_zones.zone_names():
        messages.error(request, "There is no such time zone. Choose one of the list, such as Europe/Paris.")
    else:
        User.objects.filter(pk=user.pk).update(time_zone=name)
        request.session[time_zones.SESSION_ENTRY] = name
        messages.success(request, f"Times are shown in {name or 'UTC'}.")
    return redirect(f"{reverse('account')}#time")


@never_cache
@login_required
@require_POST
def account_sign_out(request: HttpRequest) -> HttpResponse:
    """Sign out of the session with the number in the form, or of all others."""
    user = request.user
    assert isinstance(user, User)
    number = request.POST.get("number") or None
    ended = sessions.sign_out(user, request.session.session_key, number)
    messages.success(request, f"Signed out of {ended} other browser{'s' if ended != 1 else ''}.")
    return redirect(f"{reverse('account')}#sessions")


def recommend_password(request: HttpRequest, user: User) -> None:
    """After a sign-in by link: recommend a password, and note the time of the sign-in."""
    request.session[LINK_AT] = time.time()
    change = "Set a new password" if user.has_usable_password() else "Set a password"
    messages.warning(
        request,
        format_html(
            'This link works only once. <a href="{}">{}</a> to sign in again; this session ends in 14 days.',
            reverse("account"),
            change,
        ),
    )


def _needs_old_password(request: HttpRequest, user: User) -> bool:
    signed_in_at = request.session.get(LINK_AT, 0.0)
    return user.has_usable_password() and not 0.0 <= time.time() - signed_in_at < LINK_SECONDS
