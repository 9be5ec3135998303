"""A run is killed and resumed: the agent reports it and the charts show the attempts as one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.live_servers import Server

import fp8scope
from fp8scope.config import Settings
from fp8scope.delivery.resend import send_spool
from fp8scope.recording.spool import find_spools
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries

KILLED = """
import os, signal, sys, fp8scope
run = fp8scope.init(name="killed", resume=sys.argv[1])
for number in range(1, 11):
    with run.step() as step:
        step.log(loss=1.0)
# On a busy machine the kill could come before the last rows are on disk.
run.session.writers.pipeline.settle()
with run.step():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_works(server: Server, tmp_path: Path) -> None:
    agent_environment = {
        "FP8SCOPE_URL": server.url,
        "FP8SCOPE_TOKEN": server.token,
        "FP8SCOPE_DIR": str(tmp_path),
    }
    run_id = "0d9f2a56-7c0b-4f0e-9e39-3f4a4c1f9d11"
    command = [sys.executable, "-c", KILLED, run_id]
    assert subprocess.run(command, env={**os.environ, **agent_environment}, check=False).returncode == -9
    settings = Settings(url=server.url, token=server.token, directory=tmp_path)
    (spool,) = find_spools(tmp_path)
    assert send_spool(spool, settings, 60.0).killed
    stored = Run.objects.get(pk=run_id)
    assert stored.state == RunState.FAILED and "was killed" in stored.error
    assert list(queries.scalar(stored.id, "loss").steps) == list(range(1, 11))
    # Resume on another machine, from step 7.
    elsewhere = tmp_path / "elsewhere"
    with fp8scope.init(
        name="killed", resume=run_id, url=server.url, token=server.token, directory=elsewhere
    ) as run:
        assert run.attempt == 1
        for number in range(7, 10):
            with run.step(number=number) as step:
                step.log(loss=2.0)
    stored.refresh_from_db()
    assert (stored.state, stored.error) == (RunState.FINISHED, "")
    line = queries.scalar(stored.id, "loss")
    assert list(line.steps) == list(range(1, 10))
    assert list(line.values) == [1.0] * 6 + [2.0] * 3
    assert sorted(stored.writers.values_list("attempt", "first_step", "failed")) == [
        (0, 1, True),
        (1, 7, False),
    ]
