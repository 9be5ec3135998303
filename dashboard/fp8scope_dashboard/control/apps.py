from typing import Any

from django.apps import AppConfig

from fp8scope_dashboard.alerts.signals import event_opened


class ControlConfig(AppConfig):
    name = "fp8scope_dashboard.control"
    # The app was named `loop` when its tables were created.
    label = "loop"

    def ready(self) -> None:
        event_opened.connect(carry_out_action)


def carry_out_action(event: Any, **_: Any) -> None:
    """Give the command that an event's rule asks for."""
    # Models can be imported only once all apps are loaded.
    from fp8scope_dashboard.control.commands import carry_out_rule_action

    carry_out_rule_action(event)
