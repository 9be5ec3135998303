from django.contrib.auth.views import LogoutView
from django.urls import path

from fp8scope_dashboard.accounts import account_page, views

urlpatterns = [
    path("signin/", views.SignIn.as_view(), name="signin"),
    path("signin/<str:token>/", views.signin_link, name="signin_link"),
    path("account/", account_page.account, name="account"),
    path("account/time-zone", account_page.account_time_zone, name="account_time_zone"),
    path("account/sign-out", account_page.account_sign_out, name="account_sign_out"),
    path("signout/", LogoutView.as_view(), name="signout"),
]
