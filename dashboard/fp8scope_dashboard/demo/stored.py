"""A client that reads stored runs from the dashboard's API: GET /api/v1/runs/{run}."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import urllib3

from fp8scope_dashboard.embedded.processes import ServerError

TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.5


class Dashboard:
    """A client of one project.

    Args:
        address: http://host:port of the installation.
        token: the project's API token.
    """

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(TIMEOUT_SECONDS), retries=False)

    def run(self, run: str) -> dict[str, Any] | None:
        """A stored run; None while the run is unknown or the server does not respond.

        Raises:
            ServerError: the server refuses the request.
        """
        try:
            response = self._pool.request("GET", f"{self._address}/api/v1/runs/{run}", headers=self._headers)
        except urllib3.exceptions.HTTPError:
            return None
        if response.status == 404 or response.status >= 500:
            return None
        if response.status != 200:
            raise ServerError(f"the dashboard responds with status {response.status} for run {run}")
        document: dict[str, Any] = response.json()
        return document

    def wait(self, run: str, ready: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """Wait until `ready` is true for a stored run, at most `seconds`, and return the run.

        Raises:
            ServerError: the dashboard has returned no data about the run within that time.
        """
        deadline = time.monotonic() + seconds
        latest: dict[str, Any] | None = None
        while True:
            latest = self.run(run) or latest
            if (latest is not None and ready(latest)) or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        if latest is None:
            raise ServerError(f"the dashboard has returned no data about run {run} within {seconds:.0f} s")
        return latest
