"""Signals of alerts, for the apps above that this one does not know."""

from django.dispatch import Signal

alert_opened = Signal()
"""Sent when a detector opens an alert, within its transaction. Argument: `alert`."""
