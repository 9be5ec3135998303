"""Become another program that cannot outlive the process which asked for it.

Run as a script, never imported by the server:

    python -I -S launch.py PARENT SIGNAL UID GID PROGRAM ARGUMENTS...

It drops to UID/GID (unless they are -1), asks the kernel to send SIGNAL when the parent dies, and then
replaces itself by PROGRAM. A script, because the alternative, `preexec_fn`, runs Python between fork and
exec, which can deadlock in a process that has threads.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signal_number: int) -> None:
    """Ask for `signal_number` when the parent thread ends; exit at once when `parent` has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died between fork and prctl: then no signal will ever come.
    if os.getppid() != parent:
        raise SystemExit(f"the process {parent} that asked for this program has ended")


def drop_to(uid: int, gid: int) -> None:
    """Give up root for good: supplementary groups, group, then user."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def main(arguments: list[str]) -> None:
    """Parse the positional arguments named in the module's docstring and exec the program."""
    parent, signal_number, uid, gid = (int(value) for value in arguments[:4])
    command = arguments[4:]
    if uid != -1:
        drop_to(uid, gid)
    # After the change of user, which clears the request.
    die_with_parent(parent, signal_number)
    # For servers/orphan.py: asked for later, the parent could be another already.
    os.environ["FP8SCOPE_PARENT"] = str(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
