from django.apps import AppConfig


class LoopConfig(AppConfig):
    name = "fp8scope_dashboard.control"
    # Migrations and tables of earlier versions bear this label.
    label = "loop"
