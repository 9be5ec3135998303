from django.apps import AppConfig


class AuditConfig(AppConfig):
    name = "fp8scope_dashboard.audit"
    label = "audit"

    def ready(self) -> None:
        # Connects its receivers.
        import fp8scope_dashboard.audit.sign_ins  # noqa: F401
