from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "fp8scope_dashboard.accounts"
    label = "accounts"
