"""The processor time of an installation's processes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

# The web server, the workers and beat are forks of it, and listed themselves.
FORK_SERVER = "fork_server"


def cpu_seconds(supervisor: Any) -> dict[str, float]:
    """CPU seconds of the installation's living processes, by name, each with its children."""
    import psutil

    totals: dict[str, float] = {}
    for name, pid in supervisor.pids().items():
        server = psutil.Process(pid)
        totals[name] = 0.0
        for process in (server, *(server.children(recursive=True) if name != FORK_SERVER else ())):
            with suppress(psutil.Error):
                times = process.cpu_times()
                totals[name] += times.user + times.system
    return totals
