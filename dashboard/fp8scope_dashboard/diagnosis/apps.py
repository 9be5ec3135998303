from django.apps import AppConfig


class DiagnosisConfig(AppConfig):
    name = "fp8scope_dashboard.diagnosis"
    label = "diagnosis"
