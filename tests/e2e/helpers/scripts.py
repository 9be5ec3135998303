"""Training scripts run as people run them: `fp8scope run SCRIPT`, with a login, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.live_servers import Server

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

SCRIPTS = Path(__file__).parents[2] / "agent" / "programs"
# Transformers prints four digits, in quotes.
PRINTED = re.compile(r"(?m)(?:\bloss |^\{'loss': '?)([\d.]+(?:e[+-]?\d+)?)")


Launched = tuple[Run, "subprocess.CompletedProcess[str]"]


def launch(
    server: Server, folder: Path, script: str, *arguments: str, options: tuple[str, ...] = ()
) -> Launched:
    """Run `fp8scope run OPTIONS SCRIPT ARGUMENTS` in `folder`; returns the run and what was printed."""
    environment = {**os.environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token}
    done = subprocess.run(
        [sys.executable, "-m", "fp8scope", "run", *options, str(SCRIPTS / f"{script}.py"), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Run.objects.get(), done


def check_stored(server: Server, launched: Launched, config: dict[str, Any], accuracy: float) -> None:
    """The run is complete, its losses are the printed ones, and its address was printed twice.

    Args:
        config: entries that the stored configuration must have, at any depth of one.
        accuracy: the relative accuracy of the printed losses.
    """
    run, done = launched
    assert run.state == "finished" and run.agent_errors == run.rows_dropped == 0
    assert run.rows_stored == run.rows_sent and run.points_stored == run.points_sent
    printed = [float(text) for text in PRINTED.findall(done.stdout)]
    losses = list(queries.scalar(run.pk, "loss").values)
    assert len(printed) >= 4 and losses == pytest.approx(printed, rel=accuracy)
    for name, value in config.items():
        stored = run.config[name]
        assert value.items() <= stored.items() if isinstance(value, dict) else stored == value, name
    page = f"{server.url}/p/{server.project.slug}/runs/{run.pk}/"
    assert [line for line in done.stderr.splitlines() if page in line] == [
        f"fp8scope: run {run.name}: {page}",
        f"fp8scope: run {run.name} has finished: {page}",
    ]
