"""The load of a scene: training processes of one run, and a person who looks at its chart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from deployment import URL, Deployment
from ledger import READ_ROWS, Acknowledgement, acknowledgements, compare
from servers import RehearsalError, wait_for

HERE = Path(__file__).parent
STEP_SECONDS = 0.05
MAX_RECOVERY_SECONDS = 180.0
END_SECONDS = 180.0


class Load:
    """Training processes that send through TLS, each a rank of one run, and a visitor of its chart."""

    def __init__(self, deployment: Deployment, folder: Path, token: str, cookie: str, ranks: int) -> None:
        folder.mkdir()
        self._deployment, self._folder = deployment, folder
        self.run = str(uuid.uuid4())
        self._token, self._cookie, self._ranks = token, cookie, ranks
        self._stop = folder / "stop"
        self._files = [folder / f"acknowledged-{rank}" for rank in range(ranks)]
        self._children: list[subprocess.Popen[str]] = []
        self._visitor: subprocess.Popen[str] | None = None
        self._proxy_log = deployment.proxy.access_log
        self._proxy_begin = self._proxy_log.stat().st_size

    def start(self, clock: dict[str, str] | None = None) -> None:
        """Start, and wait until every rank was acknowledged something. `clock` is set for rank 0."""
        for rank, file in enumerate(self._files):
            words = [sys.executable, str(HERE / "training.py"), str(file), str(self._stop), str(STEP_SECONDS)]
            # One rank ends with a loss that no rule lets pass: the alert shows that jobs run again.
            words += ["--last-loss", "nan"] if rank == 0 else []
            jumps = (clock or {}) if rank == 0 else {}
            self._children.append(self._spawn(words, f"rank-{rank}", {**self._settings(rank), **jumps}))
        self.wait_acknowledged(time.monotonic(), "the first batches")
        address = f"{URL}/p/default/runs/{self.run}/figures/loss.json"
        words = [sys.executable, str(HERE / "visitor.py"), address, self._cookie, str(self._stop)]
        self._visitor = self._spawn(words, "visitor", self._settings(0))

    def wait_acknowledged(self, since: float, what: str) -> float:
        """Wait until each rank was acknowledged a batch after `since`; returns the seconds until then.

        The moments are those of the acknowledgements, not those at which they are looked up.
        """
        wait_for(
            lambda: all(self._first_after(file, since) for file in self._files), what, MAX_RECOVERY_SECONDS
        )
        return max(self._first_after(file, since) for file in self._files) - since

    def acknowledged(self) -> list[list[Acknowledgement]]:
        return [acknowledgements(file) for file in self._files]

    def longest_silence(self, since: float) -> float:
        """The longest time after `since` in which a rank was acknowledged nothing, in seconds."""
        longest = 0.0
        for batches in self.acknowledged():
            moments = [since, *(batch.at for batch in batches if batch.at > since)]
            longest = max([longest, *(b - a for a, b in zip(moments, moments[1:], strict=False))])
        return longest

    def end(self) -> dict[str, Any]:
        """Stop, wait for the end of the run, and compare. Returns the figures of the scene."""
        ended_at = time.monotonic()
        self._stop.touch()
        ends = []
        for child in self._children:
            try:
                output, _ = child.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                raise RehearsalError("a training process does not end") from None
            ends.append(json.loads(output.splitlines()[-1]))
        seconds = time.monotonic() - ended_at
        assert self._visitor is not None
        visited = json.loads(self._visitor.communicate(timeout=90)[0].splitlines()[-1])
        alert = self._alert_seconds()
        figures = compare(self._deployment.python(READ_ROWS, self.run), self.acknowledged(), ends)
        return {
            **figures,
            "finish_s": round(seconds, 1),
            "alert_s": alert,
            "other_alerts": self._other_alerts(),
            "statuses": self._statuses(),
            "pages": visited,
        }

    def _statuses(self) -> dict[str, int]:
        """What the proxy answered to batches, by status."""
        with self._proxy_log.open() as file:
            file.seek(self._proxy_begin)
            return dict(Counter(line.split()[0] for line in file if line.rstrip().endswith("/batches")))

    def kill(self) -> None:
        for child in (*self._children, self._visitor):
            if child is not None:
                child.kill()
                child.wait()

    def _alert_seconds(self) -> float:
        """Wait for the alert of the last loss; returns for how long."""
        count = f"SELECT count(*) FROM alerts_event WHERE run_id = '{self.run}' AND kind = 'loss_not_finite'"
        primary = self._deployment.primary
        return round(wait_for(lambda: primary.fetch(count, "fp8scope"), "the alert of a NaN", 120), 1)

    def _other_alerts(self) -> int:
        """The number of alerts that nothing in the training is the reason for."""
        count = f"SELECT count(*) FROM alerts_event WHERE run_id = '{self.run}' AND kind <> 'loss_not_finite'"
        return int(self._deployment.primary.fetch(count, "fp8scope"))

    def _settings(self, rank: int) -> dict[str, str]:
        authority = str(self._deployment.proxy.authority)
        return {
            "PATH": self._deployment.environment["PATH"],
            "FP8SCOPE_URL": URL,
            "FP8SCOPE_TOKEN": self._token,
            "FP8SCOPE_DIR": str(self._folder / f"spool-{rank}"),
            "FP8SCOPE_RUN_ID": self.run,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._ranks),
            "OMP_NUM_THREADS": "1",
            # What OpenSSL trusts.
            "SSL_CERT_FILE": authority,
        }

    def _spawn(self, words: list[str], name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                self._deployment.network.inside("training", words),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    @staticmethod
    def _first_after(file: Path, since: float) -> float:
        """When the first batch after `since` was acknowledged; 0 if none was."""
        return next((batch.at for batch in acknowledgements(file) if batch.at > since), 0.0)
