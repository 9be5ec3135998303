"""Processes that give way to the servers do so although each has a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8scope_dashboard.process_setup import give_way

WAITS = [sys.executable, "-c", "print(flush=True); input()"]


@pytest.fixture(params=[True, False], ids=["own session", "our session"])
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        WAITS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=request.param
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    if child.poll() is None:
        child.communicate(b"\n")


def group(pid: int) -> str:
    """The priority of the process's session; the same text for all where the kernel has none."""
    file = Path(f"/proc/{pid}/autogroup")
    return file.read_text().rpartition(" nice ")[2].strip() if file.exists() else "none"


def test_it_works(process: subprocess.Popen[bytes]) -> None:
    leads = os.getsid(process.pid) == process.pid
    before = group(process.pid)
    give_way(5, process.pid)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 5
    # A process that shares a session, such as that of a shell, leaves the session's priority alone.
    assert group(process.pid) == ("5" if leads and before != "none" else before)


def test_a_process_that_is_gone_is_no_error(process: subprocess.Popen[bytes]) -> None:
    process.communicate(b"\n")
    give_way(5, process.pid)
