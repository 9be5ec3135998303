"""A real HTTP server that speaks docs/wire.md, and settings that try again quickly."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent.helpers.wire_server import WireServer

import fp8scope.process.open_runs
from fp8scope.config import Settings
from fp8scope.process.threads import Worker


@pytest.fixture
def server() -> Iterator[WireServer]:
    with WireServer() as running:
        yield running
        assert running.problems == []


@pytest.fixture
def settings(server: WireServer, tmp_path: Path) -> Settings:
    """Settings for `server` whose waits are short, so that a test of a hundred retries is quick."""
    return replace(
        Settings(url=server.url, token=server.token, directory=tmp_path / "spool"),
        interval=0.01,
        read_timeout=5.0,
        connect_timeout=0.5,
        backoff_base=0.01,
        backoff_cap=0.05,
        hold_seconds=0.05,
        heartbeat_seconds=0.05,
        introduce_seconds=0.2,
    )


@pytest.fixture
def online(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fp8scope.init` and `attach` send to `server`."""
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    monkeypatch.setenv("FP8SCOPE_INTERVAL", "0.05")


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    """The background threads that a test starts end with it: one that goes on trying to send would find the
    server of a later test at its address.
    """
    started: list[Worker] = []
    start = Worker.start

    def start_and_note(worker: Worker) -> None:
        started.append(worker)
        start(worker)

    monkeypatch.setattr(Worker, "start", start_and_note)
    yield started
    for worker in started:
        worker.stop()
    deadline = time.monotonic() + 60
    assert [worker for worker in started if not worker.join(deadline)] == []


@pytest.fixture(autouse=True)
def alone(workers: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees this user's configuration, nor leaves a run, a logger or a hook behind."""
    for name in [one for one in os.environ if one.startswith("FP8SCOPE_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    hook = sys.excepthook
    yield
    for run in list(fp8scope.process.open_runs.live_runs):
        run.finish(0)
    sys.excepthook = hook
    fp8scope.process.open_runs.exit_hooks.restore()
    logging.getLogger("fp8scope").handlers.clear()
    logging.getLogger("fp8scope").propagate = True
    logging.getLogger("fp8scope").setLevel(logging.NOTSET)
