from django.apps import AppConfig


class AlertsConfig(AppConfig):
    name = "fp8scope_dashboard.alerts"
    label = "alerts"
