"""exec a program with PR_SET_PDEATHSIG so that it dies with its parent.

Run as a script, never imported by a server:

    python -I -S exec_with_death_signal.py PARENT SIGNAL UID GID PROGRAM ARGUMENTS...

The script switches to UID and GID (unless they are -1), asks the kernel to send SIGNAL when the parent dies,
and execs PROGRAM. It is a script because `preexec_fn` runs Python between fork and exec, which can deadlock
in a process with threads.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signal_number: int) -> None:
    """Request `signal_number` when the parent thread ends; exit if `parent` has already ended."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died between fork and prctl; then the signal never comes.
    if os.getppid() != parent:
        raise SystemExit(f"the parent process {parent} has ended")


def drop_privileges(uid: int, gid: int) -> None:
    """Switch from root to another user: supplementary groups first, then group, then user."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def main(arguments: list[str]) -> None:
    """Parse the positional arguments named in the module's docstring and exec the program."""
    parent, signal_number, uid, gid = (int(value) for value in arguments[:4])
    command = arguments[4:]
    if uid != -1:
        drop_privileges(uid, gid)
    # Must follow the change of user, which clears the request.
    die_with_parent(parent, signal_number)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
