from django.contrib.auth.views import LogoutView
from django.urls import path
from django.urls.converters import StringConverter, register_converter
from django.views.decorators.http import require_http_methods

from fp8scope_dashboard.accounts import account_page, views
from fp8scope_dashboard.accounts.oidc import views as oidc
from fp8scope_dashboard.accounts.second_factor import views as second_factor


class FactorChange(StringConverter):
    regex = "recovery|remove"


register_converter(FactorChange, "factor_change")

urlpatterns = [
    # Django's view takes PUT for POST, and any method of somebody who is signed in.
    path("signin/", require_http_methods(["GET", "HEAD", "POST"])(views.SignIn.as_view()), name="signin"),
    path("signin/code/", second_factor.signin_code, name="signin_code"),
    path("signin/oidc/", oidc.oidc_start, name="oidc_start"),
    path("signin/oidc/callback/", oidc.oidc_callback, name="oidc_callback"),
    path("signin/<str:token>/", views.signin_link, name="signin_link"),
    path("account/", account_page.account, name="account"),
    path("account/factor/", second_factor.factor, name="factor"),
    path("account/factor/confirm", second_factor.factor_confirm, name="factor_confirm"),
    path("account/factor/<factor_change:change>", second_factor.factor_change, name="factor_change"),
    path("account/time-zone", account_page.account_time_zone, name="account_time_zone"),
    path("account/sign-out", account_page.account_sign_out, name="account_sign_out"),
    path("signout/", LogoutView.as_view(), name="signout"),
]
