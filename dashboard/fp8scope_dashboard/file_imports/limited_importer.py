"""Limits itself, unpacks archives, then becomes the agent's importer.

Run as a script, never imported by a server:

    python -I -S limited_importer.py PARENT MEMORY SECONDS UNPACKED ENTRIES FOLDERS ROOT PATH PROGRAM...

The limits hold for the unpacking too: an archive may be made to need much memory before its first file. It is
a script because `preexec_fn` runs Python between fork and exec, which can deadlock in a process with threads.
"""

import ctypes
import os
import resource
import signal
import stat
import sys
import zipfile
import zlib
from pathlib import Path

PR_SET_PDEATHSIG = 1
CHUNK = 1 << 20
OPEN_FILES = 256
FAILED = 1


class ArchiveError(Exception):
    """The archive is not unpacked; the message says why."""


def limit(parent: int, memory: int, seconds: int, unpacked: int) -> None:
    """Bound this process and what it becomes; it ends with the parent thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(FAILED)
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, unpacked),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def unpack_all(folder: Path, unpacked: int, entries: int, folders: int) -> None:
    """Replace the archives in a folder by folders with their content.

    Raises:
        ArchiveError: an entry leads out of its folder, is a link or encrypted, or there is too much.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() != ".zip":
            continue
        target = path.with_suffix("")
        if target.exists():
            raise ArchiveError(f"{path.name}: there is a file {target.name} beside it: rename one of them")
        unpacked -= unpack(path, target, unpacked, entries, folders)
        path.unlink()


def unpack(path: Path, target: Path, unpacked: int, entries: int, folders: int) -> int:
    """Unpack an archive. Returns its bytes, which are counted as they come, whatever its headers say."""
    total = 0
    with zipfile.ZipFile(path) as archive:
        listed = archive.infolist()
        if len(listed) > entries:
            raise ArchiveError(f"{path.name} has more than {entries:,} entries: import a part of it")
        target.mkdir()
        for entry in listed:
            inner = checked(path, entry, target, folders)
            if entry.is_dir():
                inner.mkdir(parents=True, exist_ok=True)
                continue
            inner.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as packed, inner.open("xb") as file:
                while part := packed.read(CHUNK):
                    total += len(part)
                    if total > unpacked:
                        size = f"{unpacked >> 20:,} MiB"
                        raise ArchiveError(f"{path.name} unpacks to more than {size}: import a part of it")
                    file.write(part)
    return total


def checked(path: Path, entry: zipfile.ZipInfo, target: Path, folders: int) -> Path:
    """The place of an entry. Raises ArchiveError for one that leads elsewhere, or is no file or folder."""
    name = entry.filename
    parts = name.rstrip("/").split("/")
    shown = f"{path.name} has the entry {name[:80]!r}"
    if (
        name.startswith("/")
        or "\\" in name
        or ":" in parts[0]
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise ArchiveError(f"{shown}, which leads out of its folder")
    if len(parts) > folders:
        raise ArchiveError(f"{shown}, which is nested deeper than {folders} folders")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ArchiveError(f"{shown}, which is a link or a device")
    if entry.flag_bits & 1:
        raise ArchiveError(f"{shown}, which is encrypted: pack it without a password")
    return target.joinpath(*parts)


def main(arguments: list[str]) -> None:
    """Parse the arguments named in the module's docstring and exec the importer."""
    parent, memory, seconds, unpacked, entries, folders = map(int, arguments[:6])
    root, path = Path(arguments[6]), Path(arguments[7])
    limit(parent, memory, seconds, unpacked)
    try:
        unpack_all(root / path.parts[0], unpacked, entries, folders)
    except ArchiveError as error:
        say(str(error))
    except MemoryError:
        say("an archive has too many entries")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeError, OSError) as error:
        say(f"an archive is damaged: {error}")
    os.execv(arguments[8], [*arguments[8:], "--root", str(root), "--", str(root / path)])


def say(problem: str) -> None:
    """End with a sentence, in the form of the importer's."""
    print(f"fp8scope import: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])
