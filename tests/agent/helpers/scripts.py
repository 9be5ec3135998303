"""Training scripts as processes of their own: what ends a process cannot be tested within one."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings
from fp8scope.delivery.resend import SyncReport, send_spool
from fp8scope.recording.spool import find_spools

BEGIN = """
import os, signal, sys, threading, time
import fp8scope

def train(run, steps):
    for _ in range(steps):
        with run.step(tokens=10) as step:
            step.log(loss=1.0)

def wait():
    while True:
        time.sleep(0.01)
"""


def environment(server: WireServer, directory: Path, **more: str) -> dict[str, str]:
    """What a training script needs to send to `server`."""
    return {
        **os.environ,
        "FP8SCOPE_URL": server.url,
        "FP8SCOPE_TOKEN": server.token,
        "FP8SCOPE_DIR": str(directory),
        "FP8SCOPE_INTERVAL": "0.05",
        **more,
    }


@contextmanager
def script(text: str, server: WireServer, settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """A running script that begins with BEGIN; killed at the end if it lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + text],
        env=environment(server, settings.directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_script(text: str, server: WireServer, settings: Settings) -> tuple[int, str, str]:
    """Its exit status, and what it wrote to standard output and error."""
    with script(text, server, settings) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


def without_address(err: str, server: WireServer, name: str, state: str) -> str:
    """What a script wrote to standard error without the agent's lines on where its run is to be seen.

    The first is missing where the run ended before the server had answered; the last must be there, once. A
    run that failed may have kept an incident.
    """
    err = re.sub(r"(?m)^fp8scope: an incident at step \d+ is kept: fp8scope replay .*\n", "", err)
    page = rf"{re.escape(server.url)}/runs/[0-9a-f-]{{36}}"
    left, ends = re.subn(rf"(?m)^fp8scope: run {re.escape(name)} has {state}: {page}\n", "", err)
    assert ends == 1, err
    left, begins = re.subn(rf"(?m)^fp8scope: run {re.escape(name)}: {page}\n", "", left)
    assert begins <= 1, err
    return left


def said(process: subprocess.Popen[str]) -> str:
    """The next line that the script prints."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return line.strip()


def sync_all(settings: Settings) -> list[SyncReport]:
    """Send what is left, as `fp8scope sync` does."""
    return [send_spool(one, settings, 10.0) for one in find_spools(settings.directory)]
