"""The last resort of a supervised process whose supervisor was killed and that does not end by itself.

The kernel sends our children a signal when the supervisor dies (see `launch`). A Celery process that was just
waiting for the Redis that died in the same moment can take that signal and go on waiting. So it watches for
itself: a while after its parent has gone, it kills its own session, forked children included.
"""

import os
import signal
import threading
import time

GRACE_SECONDS = 15.0
POLL_SECONDS = 1.0


def end_after_parent(grace: float = GRACE_SECONDS) -> threading.Thread | None:
    """Watch the parent from a thread; `grace` seconds after its death SIGKILL this process's group.

    Does nothing (and returns None) in a process that `launch` did not start, and in one that does not lead
    its session: there the group is not ours alone.
    """
    parent = os.environ.get("FP8SCOPE_PARENT", "")
    if not parent.isdecimal() or os.getsid(0) != os.getpid():
        return None
    thread = threading.Thread(
        target=_watch, args=(int(parent), grace), name="fp8scope-orphan-watch", daemon=True
    )
    thread.start()
    return thread


def _watch(parent: int, grace: float) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    time.sleep(grace)
    os.killpg(0, signal.SIGKILL)
