"""What comes back with the server's answers: alerts and commands, each handed over once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8scope.delivery.cursor import Progress
from fp8scope.guard import Guard

AlertSink = Callable[[Sequence[Mapping[str, Any]]], None]
CommandSink = AlertSink


class Tidings:
    """Asks for what is new and hands it over. Without `on_commands` no commands are asked for, or taken."""

    def __init__(self, guard: Guard, on_alerts: AlertSink, on_commands: CommandSink | None) -> None:
        self._guard = guard
        self._on_alerts = on_alerts
        self._on_commands = on_commands

    def query(self, progress: Progress) -> str:
        """What of the run's alerts and commands is known here; without commands_after none are sent."""
        query = f"?alerts_after={progress.alerts_after}"
        if self._on_commands is None:
            return query
        return f"{query}&commands_after={progress.commands_after}"

    def take(self, answer: Mapping[str, Any], progress: Progress) -> None:
        """Hand over the alerts and commands that an answer brings, each once; note it in `progress`."""
        if alerts := _fresh(answer.get("alerts"), progress.alerts_after):
            progress.alerts_after = max(alert["id"] for alert in alerts)
            with self._guard.shield("reading alerts"):
                self._on_alerts(alerts)
        if self._on_commands is None:
            return
        if commands := _fresh(answer.get("commands"), progress.commands_after):
            progress.commands_after = max(command["id"] for command in commands)
            with self._guard.shield("reading commands"):
                self._on_commands(commands)


def _fresh(found: Any, after: int) -> list[Mapping[str, Any]]:
    """Those with an id greater than `after`; what is none of ours is passed over."""
    items = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [one for one in items if isinstance(one.get("id"), int) and one["id"] > after]
