from django.apps import AppConfig


class LoopConfig(AppConfig):
    name = "fp8scope_dashboard.control"
    label = "loop"
