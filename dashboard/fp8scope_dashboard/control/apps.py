from typing import Any

from django.apps import AppConfig

from fp8scope_dashboard.alerts.signals import alert_opened


class ControlConfig(AppConfig):
    name = "fp8scope_dashboard.control"
    # The app was named `loop` when its tables were created.
    label = "loop"

    def ready(self) -> None:
        alert_opened.connect(carry_out_action)


def carry_out_action(alert: Any, **_: Any) -> None:
    """Give the command that an alert's rule asks for."""
    # Models can be imported only once all apps are loaded.
    from fp8scope_dashboard.control.commands import carry_out_rule_action

    carry_out_rule_action(alert)
