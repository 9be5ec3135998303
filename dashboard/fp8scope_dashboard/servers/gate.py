"""A child starts early and waits: it imports its modules while what it needs is still being started."""

from __future__ import annotations

import os


class Gate:
    """Holds children back until `open`; those that start later pass at once.

    A pipe to which nobody writes: its writing end is ours alone, and reading ends when that is closed.

    Attributes:
        fd: the reading end, for children to inherit and give to `wait`.
    """

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()

    def open(self) -> None:
        """Let all children pass, now and from now on."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def close(self) -> None:
        """Give the descriptors back. Children that still wait pass: stop them first."""
        self.open()
        os.close(self.fd)


def wait(fd: int) -> None:
    """In a child: wait until the gate of this descriptor is open."""
    os.read(fd, 1)
    os.close(fd)
