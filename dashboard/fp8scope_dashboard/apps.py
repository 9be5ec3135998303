"""The project as a Django app: loads what belongs to no single app."""

from django.apps import AppConfig

# Shared tasks bind to the Celery application that is current when they are first used: it must be this one.
import fp8scope_dashboard.celery  # noqa: F401


class DashboardConfig(AppConfig):
    name = "fp8scope_dashboard"
    label = "dashboard"
