"""What the dashboard has stored of a run, asked for as any client would: GET /api/v1/runs/{run}."""

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
        token: of the project.
    """

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(TIMEOUT_SECONDS), retries=False)

    def run(self, run: str) -> dict[str, Any] | None:
        """What is stored of a run; None while it is not known, or the server does not answer.

        Raises:
            ServerError: the server refuses to tell.
        """
        try:
            answer = self._pool.request("GET", f"{self._address}/api/v1/runs/{run}", headers=self._headers)
        except urllib3.exceptions.HTTPError:
            return None
        if answer.status == 404 or answer.status >= 500:
            return None
        if answer.status != 200:
            raise ServerError(f"the dashboard answers {answer.status} about run {run}")
        document: dict[str, Any] = answer.json()
        return document

    def wait(self, run: str, ready: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """What is stored of a run once `ready` says so, or what there is after `seconds`.

        Raises:
            ServerError: the dashboard has said nothing about the run in all that time.
        """
        deadline = time.monotonic() + seconds
        latest: dict[str, Any] | None = None
        while True:
            latest = self.run(run) or latest
            if (latest is not None and ready(latest)) or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        if latest is None:
            raise ServerError(f"the dashboard has said nothing about run {run} for {seconds:.0f} s")
        return latest
