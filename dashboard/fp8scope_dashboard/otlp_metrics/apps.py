from django.apps import AppConfig


class OtlpMetricsConfig(AppConfig):
    name = "fp8scope_dashboard.otlp_metrics"
    label = "otlp_metrics"
