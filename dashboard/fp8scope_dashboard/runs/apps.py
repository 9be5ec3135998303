import importlib

from django.apps import AppConfig


class RunsConfig(AppConfig):
    name = "fp8scope_dashboard.runs"
    label = "runs"

    def ready(self) -> None:
        # Tasks are bound to the application that is current when they are first used: it must be ours.
        importlib.import_module("fp8scope_dashboard.celery")
