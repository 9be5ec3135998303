from django.contrib.auth.views import LogoutView
from django.urls import path
from django.views.decorators.http import require_http_methods

from fp8scope_dashboard.accounts import account_page, views

urlpatterns = [
    # Django's view takes PUT for POST, and any method of somebody who is signed in.
    path("signin/", require_http_methods(["GET", "HEAD", "POST"])(views.SignIn.as_view()), name="signin"),
    path("signin/<str:token>/", views.signin_link, name="signin_link"),
    path("account/", account_page.account, name="account"),
    path("account/time-zone", account_page.account_time_zone, name="account_time_zone"),
    path("account/sign-out", account_page.account_sign_out, name="account_sign_out"),
    path("signout/", LogoutView.as_view(), name="signout"),
]
