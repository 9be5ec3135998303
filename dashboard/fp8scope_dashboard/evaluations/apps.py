from django.apps import AppConfig


class EvaluationsConfig(AppConfig):
    name = "fp8scope_dashboard.evaluations"
    label = "evaluations"
