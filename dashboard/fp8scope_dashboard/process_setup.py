"""Settings that the web server and the Celery processes apply to themselves when they start."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

# Parameters of mallopt(3), from <malloc.h>.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8

MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""The largest value that glibc accepts for M_MMAP_THRESHOLD."""
TRIM_THRESHOLD_BYTES: Final = 64 << 20
"""The most free memory that each arena keeps."""
ARENAS: Final = 2

GRACE_SECONDS = 15.0
POLL_SECONDS = 1.0
GIVE_WAY_ATTEMPTS = 5


def keep_freed_memory() -> bool:
    """Let malloc reuse the memory of freed arrays. Returns False if the C library does not support it.

    By default glibc maps each array above 128 KiB separately and unmaps it when it is freed, so the kernel
    clears its pages again for the next array. On a virtual machine this took half of the time that reading a
    chart's data takes. The number of arenas is limited, which limits the memory that is kept.
    """
    settings = (
        (M_ARENA_MAX, ARENAS),
        (M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
    )
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(parameter, value) == 1 for parameter, value in settings)
    return False


def give_way(niceness: int, pid: int = 0) -> None:
    """Lower the priority of a process (0: this one), and of its session if it leads that.

    Linux shares the processors between sessions first (`sched_autogroup_enabled`, on by default), and each of
    our processes has a session of its own. So the niceness of the process alone means nothing to the others.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    pid = pid or os.getpid()
    with suppress(OSError):
        if os.getsid(pid) != pid:
            return
        for _ in range(GIVE_WAY_ATTEMPTS):
            # The kernel takes ten such changes a second from ordinary users, together.
            with suppress(BlockingIOError):
                Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
                return
            time.sleep(POLL_SECONDS / 10)


def give_way_in_thread(niceness: int) -> None:
    """Lower the priority of the current thread among those of its process; on Linux each has its own."""
    if niceness and sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def kill_after_parent_exit(parent: int, grace: float = GRACE_SECONDS) -> threading.Thread:
    """Watch the parent from a thread; send SIGKILL to the process group `grace` seconds after it dies.

    The kernel signals a child when its parent dies (embedded/exec_with_death_signal.py). A Celery process
    that waits for a Redis that died at the same moment can lose that signal, so it also watches its parent.

    Args:
        parent: the number of the process that started this one, which leads its session. It is an argument
            because the parent may have died already.
    """
    thread = threading.Thread(
        target=_watch_parent, args=(parent, grace), name="fp8scope-parent-watchdog", daemon=True
    )
    thread.start()
    return thread


def _watch_parent(parent: int, grace: float) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    time.sleep(grace)
    os.killpg(0, signal.SIGKILL)
