from django.contrib.auth.views import LogoutView
from django.urls import path

from fp8scope_dashboard.accounts import account_page, views

urlpatterns = [
    path("signin/", views.SignIn.as_view(), name="signin"),
    path("signin/<str:token>/", views.signin_link, name="signin_link"),
    path("account/", account_page.account, name="account"),
    path("signout/", LogoutView.as_view(), name="signout"),
]
