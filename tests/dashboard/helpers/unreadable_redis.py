"""Append-only files of a Redis that no server reads."""

from __future__ import annotations

from pathlib import Path


def make_unreadable(directory: Path) -> None:
    """Give the base files in this data directory the version of a format that no server knows."""
    (base,) = directory.glob("appendonlydir/*.base.rdb")
    content = base.read_bytes()
    base.write_bytes(
        b"VALKEY999" + content[9:] if content.startswith(b"VALKEY") else b"REDIS9999" + content[9:]
    )
