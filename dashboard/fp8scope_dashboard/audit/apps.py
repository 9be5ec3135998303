from django.apps import AppConfig


class AuditConfig(AppConfig):
    name = "fp8scope_dashboard.audit"
    label = "audit"
