"""Kills a supervised process that ignores the death of its supervisor."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
from helpers.waiting import wait_until

from fp8scope_dashboard.embedded import processes

# Leads a session, forks a child, ignores the signal of the kernel, and sleeps.
STUBBORN = """
import os, signal, sys, time
from pathlib import Path
from fp8scope_dashboard.process_setup import kill_after_parent_exit
signal.signal(signal.SIGTERM, signal.SIG_IGN)
parent = os.getppid()
child = os.fork()
if child:
    kill_after_parent_exit(parent, grace=0.2)
    Path(sys.argv[1]).write_text(f"{os.getpid()} {child}\\n")
time.sleep(1000)
"""
PARENT = """
import signal, sys, time
from pathlib import Path
from fp8scope_dashboard.embedded import processes
processes.spawn([sys.executable, "-c", Path(sys.argv[1]).read_text(), sys.argv[2]],
              death_signal=signal.SIGTERM, output=1)
time.sleep(1000)
"""


def test_it_works(tmp_path: Path) -> None:
    script, pids = tmp_path / "stubborn.py", tmp_path / "pids"
    script.write_text(STUBBORN)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(script), str(pids)])
    try:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), "the children's process ids")
        assert parent.poll() is None
        family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        assert len(family) == 2 and not any(processes.has_ended(process) for process in family)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert processes.wait_ended(family, 60) == []
