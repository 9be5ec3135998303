"""The alerts of one run while its findings are applied: read once, instead of for each finding."""

from __future__ import annotations

from functools import cached_property

from django.db.models import Q

from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.runs.models import Run


class RunAlerts:
    """The alerts of a run that are unresolved or whose condition lasts, oldest first.

    Use it under the run's lock and for one transaction: detectors change alerts only under this lock. What a
    person changes in the meantime is seen by the next transaction; every change of a state names the states
    that it may start from, so of two simultaneous changes one loses (see lifecycle.py).
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def unresolved(self, generation: str | None = None) -> list[Alert]:
        """The unresolved alerts, of all generations or of one."""
        return [
            alert
            for alert in self._live
            if alert.state in lifecycle.UNRESOLVED and generation in (None, alert.generation)
        ]

    def lasting(self) -> list[Alert]:
        """The alerts whose condition lasts, also those that a person has resolved."""
        return [alert for alert in self._live if alert.seen_by]

    def add(self, alert: Alert) -> None:
        """Add an alert that was created or reopened."""
        if all(other.pk != alert.pk for other in self._live):
            alert.run = self.run
            self._live.append(alert)
            self._live.sort(key=lambda other: other.pk)

    @property
    def has_any(self) -> bool:
        """Return whether the run has any alert, also resolved ones."""
        return bool(self._live) or self._had_any

    @cached_property
    def _had_any(self) -> bool:
        return Alert.objects.filter(run=self.run).exists()

    @cached_property
    def _live(self) -> list[Alert]:
        live = Alert.objects.filter(Q(state__in=lifecycle.UNRESOLVED) | ~Q(seen_by=[]), run=self.run)
        alerts = list(live.order_by("id"))
        for alert in alerts:
            alert.run = self.run
        return alerts
