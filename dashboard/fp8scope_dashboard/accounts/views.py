"""Sign in with a password or a link."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from fp8scope_dashboard.accounts import account_page, services
from fp8scope_dashboard.accounts.addresses import address_group
from fp8scope_dashboard.accounts.attempts import attempts
from fp8scope_dashboard.accounts.second_factor.sign_in import sign_in


class SignIn(LoginView):
    """The sign-in page. Attempts are throttled; see accounts.attempts."""

    template_name = "accounts/signin.html"
    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not settings.PASSWORDS:
            return self.render_to_response(
                self.get_context_data(form=self.get_form_class()(request)), status=403
            )
        wait = attempts.admit(request.POST.get("username", ""), _address(request))
        if wait == 0:
            return super().post(request, *args, **kwargs)
        # The password is not checked, so that the response does not show whether it is correct.
        context = self.get_context_data(form=self.get_form_class()(request), wait=wait)
        return self.render_to_response(context, status=429, headers={"Retry-After": str(wait)})

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        attempts.succeeded(self.request.POST.get("username", ""), _address(self.request))
        return sign_in(self.request, form.get_user(), self.get_redirect_url())

    def get_context_data(self, **more: Any) -> dict[str, Any]:
        return super().get_context_data(**more, passwords=settings.PASSWORDS, provider=settings.OIDC)


def _address(request: HttpRequest) -> str:
    return address_group(request.META.get("REMOTE_ADDR"))


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def signin_link(request: HttpRequest, token: str) -> HttpResponse:
    """A one-time sign-in link. Opening it only shows a button, because chat programs preview links."""
    if request.method != "POST":
        return _link_page(request, usable=services.is_usable_link(token))
    user = services.use_sign_in_link(token)
    if user is None:
        return _link_page(request, usable=False)
    answer = sign_in(request, user, request.GET.get("next", ""), by_link=True)
    if request.user.is_authenticated:
        account_page.recommend_password(request, user)
    return answer


def _link_page(request: HttpRequest, *, usable: bool) -> HttpResponse:
    return render(request, "accounts/signin_link.html", {"usable": usable}, status=200 if usable else 410)
