"""How the C library hands out memory to the processes that compute on arrays."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

# <malloc.h>. The names are mallopt(3)'s.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8

LARGEST_KEPT: Final = 32 << 20
"""Bytes: the most that M_MMAP_THRESHOLD takes."""

KEPT: Final = 64 << 20
"""Bytes that each arena may keep free."""

ARENAS: Final = 2


def keep_freed_memory() -> bool:
    """Take the memory of a freed array for the next one; whether the C library can be told to.

    By default glibc maps each array of more than 128 KiB anew and gives it back when it is freed, and the
    kernel clears every page again when it is first touched: on a virtual machine that was half of the time
    that a chart's data took. Few arenas bound what is kept.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        wanted = ((M_ARENA_MAX, ARENAS), (M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, KEPT))
        return all(mallopt(name, value) == 1 for name, value in wanted)
    return False
