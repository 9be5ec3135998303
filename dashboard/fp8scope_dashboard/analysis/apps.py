from django.apps import AppConfig


class AnalysisConfig(AppConfig):
    name = "fp8scope_dashboard.analysis"
    label = "analysis"
