from django.apps import AppConfig


class SharedReportsConfig(AppConfig):
    name = "fp8scope_dashboard.shared_reports"
    label = "shared_reports"
