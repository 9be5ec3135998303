"""Log files of the children: complete, limited in size, and passed on line by line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.waiting import wait_until

from fp8scope_dashboard.servers import children
from fp8scope_dashboard.servers.children import LogFile


@pytest.fixture
def shown() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def log(tmp_path: Path, shown: list[tuple[str, str]]) -> Iterator[LogFile]:
    file = LogFile(tmp_path, "web", lambda name, line: shown.append((name, line)))
    yield file
    file.close()


def write_to(log: LogFile, data: bytes) -> None:
    output = log.pipe()
    with os.fdopen(output, "wb") as stream:
        stream.write(data)


def test_it_works(log: LogFile, shown: list[tuple[str, str]], tmp_path: Path) -> None:
    write_to(log, b"first\nsecond\n")
    wait_until(lambda: len(shown) == 2, "both lines arrive")
    assert shown == [("web", "first"), ("web", "second")]
    assert (tmp_path / "web.log").read_text() == "first\nsecond\n"


def test_keeps_a_line_without_a_line_break(log: LogFile, shown: list[tuple[str, str]]) -> None:
    write_to(log, b"whole\nhalf")
    wait_until(lambda: len(shown) == 2, "both lines arrive")
    assert shown[1] == ("web", "half")


def test_replaces_bytes_that_are_not_text(log: LogFile, shown: list[tuple[str, str]], tmp_path: Path) -> None:
    write_to(log, b"\xff\xfe\x00 100%s\n")
    wait_until(lambda: shown, "the line arrives")
    assert shown == [("web", "\ufffd\ufffd\x00 100%s")]
    assert (tmp_path / "web.log").read_text() == "\ufffd\ufffd\x00 100%s\n"


def test_splits_a_very_long_line(log: LogFile, shown: list[tuple[str, str]]) -> None:
    write_to(log, b"x" * (2 * children.MAX_LINE_BYTES + 5))
    wait_until(lambda: len(shown) == 3, "three pieces arrive")
    assert [len(line) for _, line in shown] == [children.MAX_LINE_BYTES, children.MAX_LINE_BYTES, 5]


def test_rotates_the_files(tmp_path: Path) -> None:
    log = LogFile(tmp_path, "noisy", max_bytes=1000)
    for number in range(1000):
        log.write(f"line {number:05}")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["noisy.log", "noisy.log.1", "noisy.log.2", "noisy.log.3"]
    assert all(path.stat().st_size <= 1000 for path in files)
    assert files[0].read_text().endswith("line 00999\n")


def test_a_new_start_appends_to_the_file(tmp_path: Path) -> None:
    for word in ("one", "two"):
        log = LogFile(tmp_path, "web")
        log.write(word)
        log.close()
    assert (tmp_path / "web.log").read_text() == "one\ntwo\n"
