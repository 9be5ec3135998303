"""Alerts and commands that come with the server's answers, each handed over once."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8scope.delivery.cursor import SendProgress
from fp8scope.guard import Guard

MAX_WAITING_ALERTS = 1000
MAX_TEXT = 4000

DocumentSink = Callable[[Sequence[Mapping[str, Any]]], None]
"""Takes alerts or commands as the server writes them; called on the sender's thread."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert of the server. `step` is where it was noticed, `onset_step` where it began.

    `rule` is the name of a rule that people added; empty for built-in kinds.
    """

    id: int
    kind: str
    severity: str
    message: str
    step: int | None = None
    onset_step: int | None = None
    value: float | None = None
    threshold: float | None = None
    opened_at: str = ""
    rule: str = ""

    @classmethod
    def from_answer(cls, document: Mapping[str, Any]) -> "Alert":
        """Read one of the alerts of an answer. Fields that are missing or of another type are left out."""

        def number(key: str) -> float | None:
            return float(document[key]) if isinstance(document.get(key), int | float) else None

        def whole(key: str) -> int | None:
            return int(document[key]) if isinstance(document.get(key), int) else None

        def text(key: str) -> str:
            return str(document.get(key) or "")[:MAX_TEXT]

        return cls(
            id=int(document["id"]),
            kind=text("kind"),
            severity=text("severity"),
            message=text("message"),
            step=whole("step"),
            onset_step=whole("onset_step"),
            value=number("value"),
            threshold=number("threshold"),
            opened_at=text("opened_at"),
            rule=text("rule"),
        )


class AlertQueue:
    """Takes alerts on the sender's thread and delivers them on the training thread."""

    def __init__(self) -> None:
        self.waiting: deque[Alert] = deque(maxlen=MAX_WAITING_ALERTS)
        self.callbacks: list[Callable[[Alert], object]] = []
        self.listeners: list[Callable[[Alert], None]] = []
        """Called on the sender's thread when an alert arrives."""

    def take(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Keep the alerts of an answer until `deliver`."""
        for document in documents:
            alert = Alert.from_answer(document)
            self.waiting.append(alert)
            for listener in self.listeners:
                listener(alert)

    def deliver(self) -> None:
        """Call the callbacks with every waiting alert; whatever they raise is raised here."""
        while self.waiting and self.callbacks:
            alert = self.waiting.popleft()
            for callback in self.callbacks:
                callback(alert)


class Inbox:
    """Asks for new alerts and commands and hands them over. Without `on_commands` it asks for no commands."""

    def __init__(self, guard: Guard, on_alerts: DocumentSink, on_commands: DocumentSink | None) -> None:
        self._guard = guard
        self._on_alerts = on_alerts
        self._on_commands = on_commands

    def query(self, progress: SendProgress) -> str:
        """The URL query that says which alerts and commands are known. Without commands_after the server
        sends no commands.
        """
        query = f"?alerts_after={progress.alerts_after}"
        if self._on_commands is None:
            return query
        return f"{query}&commands_after={progress.commands_after}"

    def take(self, answer: Mapping[str, Any], progress: SendProgress) -> None:
        """Hand over the new alerts and commands of an answer, and note them in `progress`."""
        if alerts := _newer(answer.get("alerts"), progress.alerts_after):
            progress.alerts_after = max(alert["id"] for alert in alerts)
            with self._guard.shield("reading alerts"):
                self._on_alerts(alerts)
        if self._on_commands is None:
            return
        if commands := _newer(answer.get("commands"), progress.commands_after):
            progress.commands_after = max(command["id"] for command in commands)
            with self._guard.shield("reading commands"):
                self._on_commands(commands)


def _newer(documents: Any, after: int) -> list[Mapping[str, Any]]:
    """Those with an id greater than `after`; anything that is not a document with an id is skipped."""
    valid = [entry for entry in documents if isinstance(entry, dict)] if isinstance(documents, list) else []
    return [document for document in valid if isinstance(document.get("id"), int) and document["id"] > after]
