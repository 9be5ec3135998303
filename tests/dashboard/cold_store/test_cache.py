"""Bodies on the local disk: bounded, checked by the reader, and never the reason of an error."""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path

import pytest

from fp8scope_dashboard.cold_store.cache import BodyCache


def body_of(number: int, size: int = 1_000) -> tuple[bytes, bytes]:
    body = number.to_bytes(4, "big") * (size // 4)
    return sha256(body).digest(), body


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_it_works(tmp_path: Path) -> None:
    cache = BodyCache(tmp_path / "cache", 100_000)
    digest, body = body_of(1)
    assert cache.get(digest) is None
    cache.put(digest, body)
    assert cache.get(digest) == body and BodyCache(tmp_path / "cache", 100_000).get(digest) == body
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.stat().st_mode & 0o077 == 0, "nobody else reads it"


def test_it_stays_below_its_limit(tmp_path: Path) -> None:
    """Also for what other processes have put, and what they left when they were killed."""
    one, other = BodyCache(tmp_path, 20_000), BodyCache(tmp_path, 20_000)
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "tmpleft").write_bytes(bytes(5_000))
    os.utime(tmp_path / "00" / "tmpleft", (0, 0))
    for number in range(100):
        (one if number % 2 else other).put(*body_of(number))
        assert size_of(tmp_path) <= 20_000 + 5_000 * (number < 10)
    assert not (tmp_path / "00" / "tmpleft").exists()
    assert size_of(tmp_path) >= 15_000, "it is used"


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    cache = BodyCache(tmp_path, 20_000)
    digest, body = body_of(0)
    cache.put(digest, body)
    for number in range(1, 60):
        cache.put(*body_of(number))
        for path in tmp_path.rglob("*"):
            os.utime(path, (number, number))
        assert cache.get(digest) == body
    assert cache.get(body_of(1)[0]) is None


def test_a_body_larger_than_the_cache_is_not_put(tmp_path: Path) -> None:
    BodyCache(tmp_path, 999).put(*body_of(1))
    assert size_of(tmp_path) == 0


def test_a_disk_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    cache = BodyCache(tmp_path / "cache", 100_000)
    with caplog.at_level(logging.WARNING):
        cache.put(*body_of(1))
    assert "cannot be written" in caplog.text and cache.get(body_of(1)[0]) is None
