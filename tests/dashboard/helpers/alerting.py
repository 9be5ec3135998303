"""Channels of a project that tests route alerts to."""

from __future__ import annotations

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Channel


def make_hook(project: Project, name: str = "hook") -> Channel:
    """A webhook to an address that is never reached."""
    channel = Channel(project=project, name=name)
    channel.config = {"url": f"https://{name}.example/"}
    channel.save()
    return channel
