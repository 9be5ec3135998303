"""The longest query of a web process."""

from __future__ import annotations

from django.db import connections


def limit_statements(seconds: int) -> None:
    """Let PostgreSQL end each query of this process that takes longer; 0: no limit.

    Without it a request could hold a connection for good. Jobs have no limit, so this is no setting of all
    processes. Call it before the first connection. It is a parameter of the connection, which pgbouncer
    refuses unless it is set to ignore it.
    """
    if seconds:
        for settings in connections.settings.values():
            # Options of the database's URL stay.
            given = settings["OPTIONS"].get("options", "")
            settings["OPTIONS"]["options"] = f"{given} -c statement_timeout={seconds * 1000}".lstrip()
