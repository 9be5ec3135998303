from typing import Any

from django.apps import AppConfig

from fp8scope_dashboard.accounts.signals import project_created


class AlertsConfig(AppConfig):
    name = "fp8scope_dashboard.alerts"
    label = "alerts"

    def ready(self) -> None:
        project_created.connect(add_default_rules)


def add_default_rules(project: Any, **_: Any) -> None:
    """Give a new project one alert rule of each kind."""
    # Models can be imported only once all apps are loaded.
    from fp8scope_dashboard.alerts.services import create_default_rules

    create_default_rules(project)
