"""File systems of a few KiB that are really full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(directory: Path, kib: int) -> Iterator[Path]:
    """A file system of so many KiB at `directory`; OSError where this process may not mount one."""
    directory.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "fp8scope-test", str(directory)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        raise OSError(made.stderr.decode().strip())
    try:
        yield directory
    finally:
        # Lazily: a thread that is still ending may hold a file.
        subprocess.run(["umount", "-l", str(directory)], check=True)


def may_mount(directory: Path) -> bool:
    """Whether `small_disk` works here."""
    try:
        with small_disk(directory, 64):
            return True
    except OSError:
        return False


def fill(directory: Path) -> Path:
    """Take all the room that is left; the file that has it."""
    path = directory / "filling"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for size in (4096, 1):
            try:
                while True:
                    os.write(descriptor, bytes(size))
            except OSError:
                continue
    finally:
        os.close(descriptor)
    return path
