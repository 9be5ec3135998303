"""Helpers of these tests: run `up` as a person does, and look for whatever it leaves running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

from fp8scope_dashboard.embedded import processes

PATIENCE = 120.0


def clean_environment() -> dict[str, str]:
    """Ours without what names servers or places: `up` must find its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FP8SCOPE_")}
    for name in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE"):
        kept.pop(name, None)
    return kept


def processes_below(directory: Path) -> list[psutil.Process]:
    """Every process that works below `directory`: all children of an installation do."""
    place = str(directory.resolve())
    return list(processes.find(lambda one: not processes.has_ended(one) and one.cwd().startswith(place)))


def names_below(directory: Path) -> list[str]:
    return [" ".join(one.cmdline()) for one in processes_below(directory)]


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds; fail with `what` after a time no healthy machine needs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)


class Stay(urllib.request.HTTPRedirectHandler):
    """Take a redirect for the answer."""

    def redirect_request(self, *_: object) -> None:
        return None


def status_of(url: str, host: str | None = None) -> int:
    """The status of a GET, redirects not followed; 0 where nobody answers."""
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Up:
    """`fp8scope up` as a process of its own, ready when entered; killed, if it must be, when left."""

    def __init__(self, data_dir: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.output = ""
        command = [sys.executable, "-m", "fp8scope_dashboard.cli", "up", "--data-dir", str(data_dir)]
        self.process = subprocess.Popen(
            [*command, *(options or ("--port", "0"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment or clean_environment(),
        )

    def __enter__(self) -> Up:
        return self.wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.finish(signal.SIGTERM)

    def wait_ready(self) -> Up:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if line.startswith("Ctrl-C stops it"):
                return self
        raise AssertionError(f"up ended with status {self.process.wait()}:\n{self.output}")

    def finish(self, number: signal.Signals | None = None) -> int:
        """Send a signal, if any, and read to the end. Returns the exit status."""
        if number is not None:
            self.process.send_signal(number)
        try:
            self.output += self.process.communicate(timeout=PATIENCE)[0]
        finally:
            self.process.kill()
        return self.process.returncode

    @property
    def url(self) -> str:
        return self._found(r"fp8scope is ready: (\S+)")

    @property
    def sign_in_link(self) -> str:
        return self._found(r"sign in as administrator with this one-time link:\n\s+(\S+)")

    def _found(self, pattern: str) -> str:
        match = re.search(pattern, self.output)
        assert match is not None, f"{pattern} is not in:\n{self.output}"
        return match.group(1)
