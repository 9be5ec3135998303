"""Reads which libraries and which glibc version an ELF shared library needs.

A wheel's tag depends on both. `auditwheel show` reports the same, but would have to be installed.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple

DYNAMIC, VERSIONS_NEEDED = 6, 0x6FFFFFFE
NEEDED = 1


class Needs(NamedTuple):
    """`libraries`: file names; `glibc`: the newest version of its symbols, (0, 0) if there are none."""

    libraries: set[str]
    glibc: tuple[int, int]
    machine: int


def read(path: Path) -> Needs:
    """Read a 64-bit little-endian library. Raises ValueError if it is something else."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
    (machine,) = struct.unpack_from("<H", data, 18)
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQII", data, offset + size * i) for i in range(count)]
    libraries: set[str] = set()
    versions = [(0, 0)]
    for _, kind, _, _, start, length, link, entries in sections:
        if kind not in (DYNAMIC, VERSIONS_NEEDED):
            continue
        strings = sections[link][4]
        if kind == DYNAMIC:
            tags = struct.iter_unpack("<QQ", data[start : start + length - length % 16])
            libraries |= {_string(data, strings + value) for tag, value in tags if tag == NEEDED}
        else:
            for name in _version_names(data, start, entries, strings):
                if match := re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name):
                    versions.append((int(match[1]), int(match[2])))
    return Needs(libraries, max(versions), machine)


def _version_names(data: bytes, start: int, files: int, strings: int) -> list[str]:
    """Return the names in section .gnu.version_r: `files` records of 16 bytes, each with a chain of names."""
    names: list[str] = []
    for _ in range(files):
        _, count, _, first, following = struct.unpack_from("<HHIII", data, start)
        entry = start + first
        for _ in range(count):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
            names.append(_string(data, strings + name))
            entry += step
        start += following
    return names


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
