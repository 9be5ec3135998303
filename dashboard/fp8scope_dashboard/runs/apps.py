from django.apps import AppConfig


class RunsConfig(AppConfig):
    name = "fp8scope_dashboard.runs"
    label = "runs"
