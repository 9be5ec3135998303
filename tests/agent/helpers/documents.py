"""Code blocks of the documentation."""

import subprocess
import sys
from os import environ
from pathlib import Path

from agent.helpers.wire_server import WireServer


def run_block(block: str, server: WireServer, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=directory,
        env={**environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
