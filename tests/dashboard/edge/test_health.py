"""/healthz answers in bounded time for any state of PostgreSQL, any host name and any https setting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import urllib3
from helpers.live_servers import web_server
from helpers.waiting import wait_until

from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres

TESTS = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.django_db(transaction=True)


def ask(url: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, bytes]:
    """Status and body of a response of /healthz."""
    answer = urllib3.request(
        method, f"{url}/healthz", headers={"Host": host}, retries=False, timeout=30, redirect=False
    )
    return answer.status, answer.data


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop all processes of PostgreSQL."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def check(url: str) -> int:
    """Run the health check of the container. Returns its exit status."""
    command = [sys.executable, "-m", "fp8scope_dashboard.servers.health", "--port", url.rpartition(":")[2]]
    return subprocess.run(command, capture_output=True).returncode


def test_it_works(tmp_path: Path) -> None:
    with web_server(tmp_path / "log") as (url, _):
        assert ask(url) == (200, b"ok\n")
        assert ask(url, method="HEAD") == (200, b"")
        assert ask(url, method="POST")[0] == 405


def test_healthz_ignores_the_host_name_and_the_redirect_to_https(tmp_path: Path) -> None:
    strict = {
        "DJANGO_SETTINGS_MODULE": "dashboard.helpers.production_settings",
        "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
        "FP8SCOPE_BASE_URL": "https://fp8.example.org",
    }
    with web_server(tmp_path / "log", **strict) as (url, _):
        page = urllib3.request("GET", f"{url}/signin/", retries=False)
        assert (page.status, page.headers["Location"][:8]) == (301, "https://")
        page = urllib3.request("GET", f"{url}/signin/", headers={"Host": "10.0.0.17"}, retries=False)
        assert page.status == 400
        assert ask(url, host="10.0.0.17") == (200, b"ok\n")
        assert check(url) == 0


def test_a_frozen_database_is_reported_while_it_is_frozen(tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path / "postgres", durable=False)
    with (
        postgres as database_url,
        web_server(tmp_path / "log", DATABASE_URL=database_url) as (url, process),
    ):
        assert ask(url)[0] == 200
        time.sleep(limits.HEALTH_FRESH_SECONDS)
        pid = int((postgres.server_dir / "postmaster.pid").read_text().split()[0])
        with frozen(pid):
            answers: list[tuple[int, bytes]] = []
            threads = [threading.Thread(target=lambda: answers.append(ask(url))) for _ in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert set(answers) == {(503, b"database unavailable\n")}
            before = psutil.Process(process.pid).num_threads()
            for _ in range(4):
                assert ask(url)[0] == 503
            # Further requests start no further threads.
            assert psutil.Process(process.pid).num_threads() <= before
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 60
            assert check(url) == 1
        wait_until(lambda: ask(url)[0] == 200, "the database again", pause=0.2)


def test_a_database_that_is_gone_is_reported_at_once(tmp_path: Path) -> None:
    missing = f"postgresql://fp8scope@/fp8scope?host={tmp_path}"
    with web_server(tmp_path / "log", DATABASE_URL=missing) as (url, _):
        assert ask(url)[0] == 503
