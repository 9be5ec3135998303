"""Running `fp8scope up` as a user does, and finding the processes that it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import psutil
from helpers.waiting import PATIENCE_SECONDS

from fp8scope_dashboard.embedded import processes


def clean_environment() -> dict[str, str]:
    """The environment without addresses of servers and directories, which `up` must choose itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FP8SCOPE_")}
    for name in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE"):
        kept.pop(name, None)
    return kept


def processes_below(directory: Path) -> list[psutil.Process]:
    """Every process with a working directory below `directory`, such as the children of an installation."""
    root = str(directory.resolve())
    return list(
        processes.find(lambda process: not processes.has_ended(process) and process.cwd().startswith(root))
    )


def names_below(directory: Path) -> list[str]:
    return [" ".join(process.cmdline()) for process in processes_below(directory)]


class Stay(urllib.request.HTTPRedirectHandler):
    """Return redirects instead of following them."""

    def redirect_request(self, *_: object) -> None:
        return None


def status_of(url: str, host: str | None = None) -> int:
    """The status of a GET without following redirects; 0 without a response."""
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Up:
    """A process that runs `fp8scope up`. Ready on entry, terminated on exit."""

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
        """Send a signal, if given, and read the output to its end. Returns the exit status."""
        if number is not None:
            self.process.send_signal(number)
        try:
            self.output += self.process.communicate(timeout=PATIENCE_SECONDS)[0]
        finally:
            self.process.kill()
        return self.process.returncode

    @property
    def url(self) -> str:
        return self._match(r"fp8scope is ready: (\S+)")

    @property
    def sign_in_link(self) -> str:
        return self._match(r"sign in as administrator with this one-time link:\n\s+(\S+)")

    def log(self, name: str) -> str:
        """The end of the log of a child, such as "web"."""
        file = self.data_dir / "logs" / f"{name}.log"
        return file.read_text(errors="replace")[-10_000:] if file.exists() else ""

    def _match(self, pattern: str) -> str:
        match = re.search(pattern, self.output)
        assert match is not None, f"{pattern} is not in:\n{self.output}"
        return match.group(1)
