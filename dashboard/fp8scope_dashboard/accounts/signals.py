"""Signals of the accounts app."""

from django.dispatch import Signal

project_created = Signal()
"""Sent by `create_project`, within its transaction. Argument: `project`, the new Project."""
