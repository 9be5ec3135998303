"""Times the steps of two training scripts in turns, so that a machine that becomes busy slows both.

Each script runs in a process group of its own, without fp8scope. After every few steps the group stops,
loader workers and background threads included, and the other one goes on. A pair is two blocks that follow
each other. Used by `advisor.py`; as a program it is the script's process.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 5
"""Steps of a block."""
WARM_UP = 1
"""Blocks at the beginning that do not count: they allocate, compile and start workers."""


def ratios(faulty: Sequence[str], mended: Sequence[str], environment: dict[str, str]) -> list[float]:
    """Return the time of a step of the mended script by that of the faulty one, for each pair of blocks.

    Args:
        faulty, mended: the script and its arguments.
    """
    groups = [_Group(command, environment) for command in (faulty, mended)]
    pairs = []
    try:
        while True:
            before, after = (group.next_block() for group in groups)
            if not before or not after:
                break
            pairs.append(after / before)
    finally:
        for group in groups:
            group.end()
    return pairs[WARM_UP:]


class _Group:
    """A script in a process group that runs only while `next_block` waits for it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(write), *command],
            env=environment,
            pass_fds=(write,),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
        os.close(write)

    def next_block(self) -> float | None:
        """Let the group run until its next block ends; returns the block's seconds, None at its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
        text = os.read(self._read, 32)
        if not text:
            return None
        # Until the group has stopped, so that it takes no time of the other one.
        os.waitpid(self._process.pid, os.WUNTRACED)
        return float(text)

    def end(self) -> None:
        """End the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)


def main() -> None:
    """Run a script, and tell the parent the time of each block; it stops this process then."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    pipe, script = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    began, count = time.perf_counter(), 0

    def step_ends(*_: Any) -> None:
        nonlocal began, count
        count += 1
        if count % STEPS == 0:
            os.write(pipe, f"{time.perf_counter() - began:.9f}".encode())
            # Workers and all: returns when the parent lets the group go on.
            os.killpg(os.getpgrp(), signal.SIGSTOP)
            began = time.perf_counter()

    register_optimizer_step_post_hook(step_ends)
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
