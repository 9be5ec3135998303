from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "fp8scope_dashboard.accounts"
    label = "accounts"

    def ready(self) -> None:
        # Connects its signal.
        import fp8scope_dashboard.accounts.sessions  # noqa: F401
