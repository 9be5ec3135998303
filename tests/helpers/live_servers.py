"""The real web server and Celery worker, as processes on the test database."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import urllib3
from django.conf import settings
from django.db import connection

from fp8scope_dashboard.accounts.models import Project

START_SECONDS = 150
WEB = ("-m", "fp8scope_dashboard.servers.web")


@dataclass(frozen=True)
class Server:
    """A web server process on the test database, and a project to send to."""

    url: str
    token: str
    project: Project
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Worker:
    """A Celery worker process on the test database."""

    process: subprocess.Popen[bytes]
    log: Path


def process_environment() -> dict[str, str]:
    """Environment variables that connect a process to the database and Redis of this test session."""
    database = connection.settings_dict
    host = quote(str(database["HOST"]), safe="")
    server = f"host={host}" + (f"&port={database['PORT']}" if database["PORT"] else "")
    user = quote(str(database["USER"]), safe="")
    if database["PASSWORD"]:
        user += ":" + quote(str(database["PASSWORD"]), safe="")
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.test",
        "DATABASE_URL": f"postgresql://{user}@/{quote(str(database['NAME']))}?{server}",
        "REDIS_URL": settings.REDIS_URL,
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def web_server(
    log: Path, program: Sequence[str] = WEB, *, port: str = "0", **environment: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The ASGI server on a port, by default a free one, started as `fp8scope up` starts it.

    Yields its URL and its process.

    `program` are the arguments of Python, before those of the server. `environment` overrides the variables
    of this test session.
    """
    with socket.create_server(("127.0.0.1", int(port))) as listening, log.open("wb") as output:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, *program, "--fd", str(listening.fileno())],
            pass_fds=[listening.fileno()],
            env={**process_environment(), "FP8SCOPE_BASE_URL": url, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: _answers(url), process, log)
        yield url, process
    finally:
        stop(process)


@contextmanager
def celery_worker(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Celery worker process, once it is ready."""
    command = [sys.executable, "-m", "celery", "-A", "fp8scope_dashboard.celery:app", "worker"]
    command += ["--pool", "threads", "--concurrency", "2", "--loglevel", "INFO", "--without-mingle"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=process_environment(), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: b" ready." in log.read_bytes(), process, log)
        yield process
    finally:
        stop(process)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a new process is ready; fails with the end of its log."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"The process did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; kill it after ten seconds."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        # A redirect to https, or a refused host name, is an answer too.
        return urllib3.request("GET", f"{url}/api/v1/openapi.json", retries=False, timeout=30).status < 500
    except urllib3.exceptions.HTTPError:
        return False
