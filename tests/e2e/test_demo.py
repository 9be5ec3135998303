"""`fp8scope demo` with real servers and training processes, but few steps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import urllib3

STEPS = 120
FAULT_AT = 48
COMMAND = [sys.executable, "-m", "fp8scope_dashboard.cli", "demo", "--port", "0", "--data-dir"]
# Without the servers of this test session: the demo starts its own.
ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if key not in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE", "FP8SCOPE_BASE_URL")
}


@pytest.fixture
def finished(tmp_path: Path, prepared: Callable[[Path], Path]) -> dict[str, Any]:
    """The results of a complete demo."""
    file = tmp_path / "result.json"
    arguments = [str(prepared(tmp_path / "data")), "--exit", "--steps", str(STEPS), "--json", str(file)]
    done = subprocess.run(
        [*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    assert file.exists(), done.stdout + done.stderr
    results: dict[str, Any] = json.loads(file.read_text())
    return results | {"status": done.returncode, "output": done.stdout, "left": left_running(tmp_path)}


@pytest.mark.slow
def test_it_works(finished: dict[str, Any]) -> None:
    runs = {run["name"]: run for run in finished["runs"]}
    assert len(runs) == 5
    for run in runs.values():
        assert run["points_stored"] == run["points_sent"] > 0
        assert run["final_loss"] < 3.5
    healthy, faulty = runs["fp8 delayed scaling"], runs["fp8 stale scales"]
    # Per step: seven statistics of three tensors of twelve layers, and the scalars of this machine.
    statistics = 7 * 3 * 12
    assert STEPS * (6 + statistics) <= healthy["points_stored"] <= STEPS * (40 + statistics)
    assert healthy["verdict"] in ("equivalent", "better", "worse", "cannot_tell")
    assert {score["metric"] for score in healthy["scores"]} == {"next-byte accuracy", "nll"}
    assert all(run["alerts"] == [] for run in runs.values() if run["fault_at"] is None)
    saturation = next(alert for alert in faulty["alerts"] if alert["kind"] == "saturation_rate")
    assert faulty["fault_at"] == saturation["onset_step"] == FAULT_AT
    assert 0 < saturation["steps"] < 20
    assert 0 < saturation["seconds"] < finished["seconds"]
    assert 0 < finished["ready_seconds"] < finished["first_rows_seconds"] < finished["seconds"]
    # In so few steps a verdict may differ from that of the whole demo, which is no error.
    assert (finished["status"], finished["problems"]) == (0, [])
    for name in runs:
        assert name in finished["output"]
    assert finished["left"] == []


@pytest.fixture
def running(tmp_path: Path, prepared: Callable[[Path], Path]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running demo and the address that it has printed."""
    process = subprocess.Popen(
        [*COMMAND, str(prepared(tmp_path / "data")), "--steps", str(STEPS)],
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    link = ""
    while not link:
        line = process.stdout.readline()
        assert line, "the demo ended before it printed its address"
        link = next(iter(re.findall(r"http://\S+/signin/\S+", line)), "")
    yield process, link
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_ctrl_c_stops_everything(running: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    process, link = running
    # The demo prints the address only after the server answers.
    assert urllib3.request("GET", link, timeout=60, retries=False).status == 200
    trainers = wait_for_trainers(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 130
    assert not any(psutil.pid_exists(pid) for pid in trainers)
    assert left_running(tmp_path) == []


@pytest.mark.slow
def test_killing_a_training_process_ends_the_demo(
    running: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, _ = running
    os.kill(wait_for_trainers(tmp_path)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "the training process of 'bf16 seed 1' was killed by signal 9" in output
    assert left_running(tmp_path) == []


def wait_for_trainers(folder: Path) -> list[int]:
    """Wait for training processes of the demo in `folder`; returns their pids, oldest first."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        trainers = [
            process for process in processes_of_demo(folder) if "fp8scope.demo.train" in process.cmdline()
        ]
        if trainers:
            return [process.pid for process in sorted(trainers, key=lambda trainer: trainer.create_time())]
        time.sleep(0.1)
    raise AssertionError("no training process started")


def left_running(folder: Path) -> list[str]:
    return [" ".join(process.cmdline()) for process in processes_of_demo(folder)]


def processes_of_demo(folder: Path) -> list[psutil.Process]:
    """All processes whose working directory, arguments or FP8SCOPE_DIR contain `folder`."""
    processes = []
    for process in psutil.process_iter():
        try:
            texts = [process.cwd(), *process.cmdline(), process.environ().get("FP8SCOPE_DIR", "")]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(str(folder) in text for text in texts):
            processes.append(process)
    return processes
