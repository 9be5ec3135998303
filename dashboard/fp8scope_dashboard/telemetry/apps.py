from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    name = "fp8scope_dashboard.telemetry"
    label = "telemetry"
